"""What a server says: one POST per sample, several in flight, retries with growing pauses."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mindspeed_rl.config.rewards import REMOTE_BACKOFF_S, RewardConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.redaction import redacted_text
from mindspeed_rl.rewards.types import BuiltInReward, RewardRequest

# Status codes worth another attempt: the server is busy, restarts, or is lost behind a proxy.
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_RESPONSE_BYTES = 1 << 20
_SHOWN_CHARS = 300
_POSTED = ("sample_id", "prompt", "response", "answer", "finish_reason", "num_response_tokens")


class RemoteError(RuntimeError):
    """The server gave no reward: an error of the sample, never a 0."""


class RemoteReward:
    """Posts ``{"sample_id", "prompt", "response", "answer", ...}``, reads ``{"reward": number}``.

    ``null`` abstains. Requests are repeated after failures of the connection and status codes of a
    busy server; other answers are an error at once.

    Attributes:
        concurrency: Number of requests in flight.
    """

    def __init__(self, flags: RewardConfig) -> None:
        self._url = flags.reward_remote_url
        self._shown = f"--reward-url {redacted_text(self._url)}"  # for messages
        if not self._url.startswith(("http://", "https://")):
            raise UsageError(
                f"{self._shown}: the reward 'remote' needs the http:// or "
                "https:// address that samples are posted to"
            )
        self._timeout_s = flags.reward_remote_url_timeout_s
        self._retries = flags.reward_remote_url_retries
        self.concurrency = flags.reward_remote_url_concurrency
        self._threads = ThreadPoolExecutor(self.concurrency, "remote-reward")
        self._asked: dict[int, Future[Any]] = {}

    def prefetch(self, request: RewardRequest) -> None:
        """Post the sample in the background; the call with this sample returns the answer."""
        self._asked[request.sample_id] = self._threads.submit(self.ask, request)

    def __call__(self, request: RewardRequest) -> Any:
        """Return the server's reward of a sample.

        Raises:
            RemoteError: after all attempts, or at an answer that another attempt cannot change.
        """
        asked = self._asked.pop(request.sample_id, None)
        return self.ask(request) if asked is None else asked.result()

    def ask(self, request: RewardRequest) -> Any:
        """Post one sample, with retries, and return its reward. Blocks."""
        sample = {name: getattr(request, name) for name in _POSTED}
        body = json.dumps(sample | {"metadata": dict(request.metadata)}, default=str).encode()
        reason = ""
        for attempt in range(self._retries + 1):
            if attempt:
                # Random pauses, so that workers that failed together do not retry together.
                time.sleep(REMOTE_BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
            try:
                return self._post(body)
            except urllib.error.HTTPError as error:
                with error:
                    text = error.read(_SHOWN_CHARS).decode("utf-8", "replace")
                reason = f"status {error.code}: {text}"
                if error.code not in _TRANSIENT:
                    break
            except (OSError, http.client.HTTPException) as error:
                reason = redacted_text(f"{type(error).__name__}: {error}")
        raise RemoteError(
            f"{self._shown} gave no reward for sample {request.sample_id} after "
            f"{attempt + 1} attempts; last: {reason}"
        )

    def _post(self, body: bytes) -> Any:
        call = urllib.request.Request(
            self._url, body, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(call, timeout=self._timeout_s) as answer:
            text = answer.read(_RESPONSE_BYTES)
        try:
            return json.loads(text)["reward"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RemoteError(
                f'{self._shown} must answer {{"reward": number or null}}; '
                f"got {text[:_SHOWN_CHARS]!r}"
            ) from error


REWARD = BuiltInReward(lambda settings: RemoteReward(settings.flags))
