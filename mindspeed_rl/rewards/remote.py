"""The reward of a server: one POST per sample, several in flight, retries with growing pauses."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mindspeed_rl.rewards.settings import RemoteSettings
from mindspeed_rl.rewards.types import RewardRequest

# Worth another attempt: the server is busy, restarts, or is behind a proxy that lost it.
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_RESPONSE_BYTES = 1 << 20
_SHOWN_CHARS = 300


class RemoteError(RuntimeError):
    """The server gave no reward: an error of the sample, never a 0."""


class RemoteReward:
    """Posts ``{"sample_id", "prompt", "response", "answer", ...}``, reads ``{"reward": number}``.

    ``null`` abstains. Failures of the connection and the status codes of a busy server are tried
    again; other answers are an error at once.

    Attributes:
        concurrency: requests in flight.
    """

    def __init__(self, settings: RemoteSettings) -> None:
        if not settings.url.startswith(("http://", "https://")):
            raise ValueError(
                f"--reward-url {settings.url!r}: the reward 'remote' needs the http:// or "
                "https:// address that samples are posted to"
            )
        self._settings = settings
        self.concurrency = settings.concurrency
        self._threads = ThreadPoolExecutor(settings.concurrency, "remote-reward")
        self._asked: dict[int, Future[Any]] = {}

    def prefetch(self, requests: Sequence[RewardRequest]) -> None:
        """Ask for all of them, ``concurrency`` at a time; the answers are fetched later."""
        for request in requests:
            self._asked[request.sample_id] = self._threads.submit(self.ask, request)

    def __call__(self, request: RewardRequest) -> Any:
        """The server's reward.

        Raises:
            RemoteError: after all attempts, or at an answer that another attempt cannot change.
        """
        asked = self._asked.pop(request.sample_id, None)
        return self.ask(request) if asked is None else asked.result()

    def ask(self, request: RewardRequest) -> Any:
        """One sample, with retries. Blocks."""
        body = json.dumps(
            {
                "sample_id": request.sample_id,
                "prompt": request.prompt,
                "response": request.response,
                "answer": request.answer,
                "finish_reason": request.finish_reason,
                "num_response_tokens": request.num_response_tokens,
                "metadata": dict(request.metadata),
            },
            default=str,
        ).encode()
        settings, reason = self._settings, ""
        for attempt in range(settings.retries + 1):
            if attempt:
                # Scattered, so that workers that failed together do not come back together.
                time.sleep(settings.backoff_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
            try:
                return self._post(body)
            except urllib.error.HTTPError as error:
                with error:
                    text = error.read(_SHOWN_CHARS).decode("utf-8", "replace")
                reason = f"status {error.code}: {text}"
                if error.code not in _TRANSIENT:
                    break
            except (OSError, http.client.HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
        raise RemoteError(
            f"--reward-url {settings.url} gave no reward for sample {request.sample_id} after "
            f"{attempt + 1} attempts; last: {reason}"
        )

    def _post(self, body: bytes) -> Any:
        call = urllib.request.Request(
            self._settings.url, body, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(call, timeout=self._settings.timeout_s) as answer:
            text = answer.read(_RESPONSE_BYTES)
        try:
            return json.loads(text)["reward"]
        except (ValueError, KeyError, TypeError) as error:
            raise RemoteError(
                f'--reward-url {self._settings.url} must answer {{"reward": number or null}}; '
                f"got {text[:_SHOWN_CHARS]!r}"
            ) from error
