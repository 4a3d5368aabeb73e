"""The unfinished requests of one call of an engine: what they had before, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from mindspeed_rl.core.types import FINISH_REASONS, Completion
from mindspeed_rl.rollout.rebalance import ExpectedLength
from mindspeed_rl.rollout.rebalance_plan import Load
from mindspeed_rl.rollout.requests import GenerationRequest, NewTokens


class Port(Protocol):
    """Adds single requests to an engine and aborts them."""

    def add(
        self,
        key: str,
        token_ids: list[int],
        seed: int,
        max_tokens: int,
        temperature: float | None,
        *,
        watched: bool,
    ) -> str:
        """Start a request and return the engine's own name of it.

        Args:
            key: Name of the request in the outputs of the engine.
            token_ids: Tokens that the request has.
            seed: Seed of its noise.
            max_tokens: Tokens that it may get.
            temperature: Sampling temperature; ``None`` is that of the engine's settings.
            watched: Whether each step outputs it, and not the last one alone.
        """
        ...

    def add_part(
        self, key: str, token_ids: list[int], seed: int, max_tokens: int, later_tokens: int
    ) -> tuple[str, int]:
        """Start a request that pauses, or continue one that paused with exactly these tokens.

        Args:
            key: See :meth:`add`, like ``token_ids`` and ``seed``.
            token_ids: Tokens that the request has.
            seed: Seed of its noise.
            max_tokens: Tokens that it may get in this call.
            later_tokens: Tokens that later calls may add; above 0 it pauses instead of ending.

        Returns:
            The engine's own name of it, and how many of the last of ``token_ids`` its outputs
            begin with.
        """
        ...

    def abort(self, keys: list[str]) -> None:
        """Stop requests, which are forgotten."""
        ...


class ExpertSource(Protocol):
    """The experts that the routers of a built engine chose for the tokens of its requests."""

    def clear(self) -> None:
        """Forget all requests."""
        ...

    def take(self, name: str, output: Any, first: int, count: int) -> bytes:
        """Return the experts of ``count`` tokens of a finished request, which is then forgotten.

        Args:
            name: vLLM's name of the request.
            output: vLLM's ``CompletionOutput`` of it.
            first: Position in the sequence of the first of these tokens.
            count: Number of tokens.

        Returns:
            [count, layers with experts, k], one byte each (two above 256 experts).

        Raises:
            RuntimeError: The engine does not know those of a token.
        """
        ...


class OpenRequests:
    """The unfinished requests of one call of ``generate``, some of which move between engines.

    Args:
        port: Adds requests to the engine and aborts them.
        max_tokens: Limit of a response whose request has no limit.
        experts: Record of the experts to put into completions; requests must then not move.
        on_start: Callback with vLLM's name of each request that starts here.
    """

    def __init__(
        self,
        port: Port,
        max_tokens: int,
        experts: ExpertSource | None = None,
        on_start: Callable[[str, GenerationRequest], None] | None = None,
    ) -> None:
        self._on_start = on_start
        self._port = port
        self._limit = max_tokens
        self._experts = experts
        if experts is not None:
            experts.clear()
        self._open: dict[int, GenerationRequest] = {}
        self._names: dict[int, str] = {}
        self._known: dict[int, int] = {}  # tokens of the prefix that outputs begin with
        self._latest: dict[int, Any] = {}
        self._shown: dict[int, int] = {}  # tokens of watched requests that were handed out

    def __len__(self) -> int:
        return len(self._open)

    def add(self, requests: Iterable[GenerationRequest]) -> None:
        """Start requests on this engine, or continue them there after their prefix."""
        for request in requests:
            limit = self._limit if request.max_tokens is None else request.max_tokens
            key, tokens = str(request.sample_id), [*request.token_ids, *request.prefix_tokens]
            room, known = limit - len(request.prefix_tokens), 0
            if request.later_tokens is None:
                name = self._port.add(
                    key, tokens, request.seed, room, request.temperature, watched=request.watched
                )
            else:
                assert request.temperature is None, "a response of training that goes on later"
                assert not request.watched, "a turn of a conversation that goes on later"
                name, known = self._port.add_part(
                    key, tokens, request.seed, room, request.later_tokens
                )
            self._names[request.sample_id], self._known[request.sample_id] = name, known
            self._open[request.sample_id] = request
            self._shown.pop(request.sample_id, None)
            if self._on_start is not None:
                self._on_start(self._names[request.sample_id], request)

    def note(self, outputs: Iterable[Any]) -> None:
        """Remember the outputs of a step of the engine, finished or not."""
        for output in outputs:
            self._latest[int(output.request_id)] = output.outputs[0]

    def finish(self, outputs: Mapping[int, Any], version: int) -> dict[int, Completion]:
        """Return the completions of finished requests, which begin with the prefix.

        Raises:
            RuntimeError: vLLM aborted a request.
        """
        found = {}
        for sample_id, output in outputs.items():
            request = self._open.pop(sample_id)
            name, known = self._names.pop(sample_id), self._known.pop(sample_id)
            self._latest.pop(sample_id, None)
            last = completion(output.outputs[0], sample_id, version)
            experts = None
            if self._experts is not None:
                assert not request.prefix_tokens, "experts of a request that was on other engines"
                first = len(request.token_ids) - 1  # the position that predicts the first token
                experts = self._experts.take(name, output.outputs[0], first, len(last.token_ids))
            found[sample_id] = replace(
                last,
                token_ids=(*request.prefix_tokens, *last.token_ids[known:]),
                logprobs=(*request.prefix_logprobs, *last.logprobs[known:]),
                experts=experts,
            )
        return found

    def new_tokens(self, outputs: Iterable[Any]) -> dict[int, NewTokens]:
        """Return what a step added to the watched requests that it did not finish."""
        found = {}
        for output in outputs:
            request = self._open.get(int(output.request_id))
            if request is None or not request.watched:
                continue
            prefix, sampled = request.prefix_tokens, output.outputs[0].token_ids
            first = self._shown.get(request.sample_id, 0)
            ids = (*prefix[first:], *sampled[max(0, first - len(prefix)) :])
            found[request.sample_id] = NewTokens(first, ids)
            self._shown[request.sample_id] = first + len(ids)
        return found

    def loads(self, expected: ExpectedLength) -> list[Load]:
        """Return what is left of every unfinished request, in the order of their start."""
        found = []
        for sample_id, request in self._open.items():
            here = self._latest.get(sample_id)
            new = 0 if here is None else len(here.token_ids) - self._known[sample_id]
            generated = len(request.prefix_tokens) + new
            context = len(request.token_ids) + generated
            remaining = max(1, expected(sample_id, generated) - generated)
            computed, returns = here is not None, request.opening is not None
            found.append(Load(sample_id, context, remaining, computed, returns))
        return found

    def take(self, sample_ids: Sequence[int]) -> list[GenerationRequest]:
        """Abort requests and return them with their tokens so far as the prefix.

        Local; equal within an engine group.
        """
        found = []
        for sample_id in sample_ids:
            request = self._open.pop(sample_id)
            self._names.pop(sample_id)
            known, here = self._known.pop(sample_id), self._latest.pop(sample_id, None)
            if here is not None:
                request = replace(
                    request,
                    prefix_tokens=(*request.prefix_tokens, *here.token_ids[known:]),
                    prefix_logprobs=(*request.prefix_logprobs, *sampled_logprobs(here)[known:]),
                )
            found.append(request)
        self._port.abort([str(sample_id) for sample_id in sample_ids])
        return found


def completion(output: Any, sample_id: int, version: int) -> Completion:
    """Return the completion of one finished request.

    Raises:
        RuntimeError: vLLM ended it for another reason than a stop token or the limit.
    """
    reason, tokens = str(output.finish_reason), tuple(output.token_ids)
    if reason not in FINISH_REASONS:
        raise RuntimeError(
            f"generate: vLLM gave up sample {sample_id} after {len(tokens)} tokens ({reason!r}); "
            "it must neither be trained on nor left out, which would bias the batch"
        )
    return Completion(tokens, sampled_logprobs(output), reason, version)


def sampled_logprobs(output: Any) -> tuple[float, ...]:
    """Return the log-probs of the sampled tokens of one request, finished or not.

    Raises:
        RuntimeError: vLLM's log-probs are those of other tokens.
    """
    flat = output.logprobs
    if flat.token_ids != list(output.token_ids):
        raise RuntimeError(
            f"vLLM gave log-probs of {len(flat.token_ids)} other tokens than the "
            f"{len(output.token_ids)} that it sampled"
        )
    return tuple(flat.logprobs)


def token_scores(
    ids: Sequence[int], entries: Sequence[Any], with_entropy: bool
) -> list[tuple[float, float]]:
    """Return log-prob and entropy of each token after the first, from prompt log-probs."""
    scores = []
    for token, entry in zip(ids[1:], entries[1:], strict=True):
        entropy = 0.0
        if with_entropy:
            logp = torch.tensor([value.logprob for value in entry.values()], dtype=torch.float64)
            entropy = float(-(logp.exp() * logp.clamp(min=-1e4)).sum())
        scores.append((float(entry[token].logprob), entropy))
    return scores
