"""Tracks the unfinished requests of this rank's engine, some of which move between engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindspeed_rl.core.types import Completion
from mindspeed_rl.rollout.rebalance import ExpectedLength
from mindspeed_rl.rollout.rebalance_plan import Load
from mindspeed_rl.rollout.requests import GenerationRequest
from mindspeed_rl.rollout.vllm.patches.routed_experts import ExpertRecorder
from mindspeed_rl.rollout.vllm.requests import VllmPort, completion, sampled_logprobs


class OpenRequests:
    """The unfinished requests of one call of ``generate``.

    Args:
        port: Adds requests to the engine and aborts them.
        max_tokens: Limit of a response whose request has no limit.
        experts: Recorder of the experts to put into completions; requests must then not move.
    """

    def __init__(
        self, port: VllmPort, max_tokens: int, experts: ExpertRecorder | None = None
    ) -> None:
        self._port = port
        self._limit = max_tokens
        self._experts = experts
        if experts is not None:
            experts.clear()
        self._open: dict[int, GenerationRequest] = {}
        self._names: dict[int, str] = {}
        self._latest: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, requests: Iterable[GenerationRequest]) -> None:
        """Start requests on this engine, or continue them there after their prefix."""
        for request in requests:
            limit = self._limit if request.max_tokens is None else request.max_tokens
            self._names[request.sample_id] = self._port.add(
                str(request.sample_id),
                [*request.token_ids, *request.prefix_tokens],
                request.seed,
                limit - len(request.prefix_tokens),
                request.stream,
            )
            self._open[request.sample_id] = request

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
            name = self._names.pop(sample_id)
            self._latest.pop(sample_id, None)
            last = completion(output.outputs[0], sample_id, version)
            experts = None
            if self._experts is not None:
                assert not request.prefix_tokens, "experts of a request that was on other engines"
                first = len(request.token_ids) - 1  # the position that predicts the first token
                experts = self._experts.take(name, first, len(last.token_ids))
            found[sample_id] = replace(
                last,
                token_ids=(*request.prefix_tokens, *last.token_ids),
                logprobs=(*request.prefix_logprobs, *last.logprobs),
                experts=experts,
            )
        return found

    def loads(self, expected: ExpectedLength) -> list[Load]:
        """Return what is left of every unfinished request, in the order of their start."""
        found = []
        for sample_id, request in self._open.items():
            here = self._latest.get(sample_id)
            generated = len(request.prefix_tokens) + (0 if here is None else len(here.token_ids))
            context = len(request.token_ids) + generated
            remaining = max(1, expected(sample_id, generated) - generated)
            found.append(Load(sample_id, context, remaining, computed=here is not None))
        return found

    def take(self, sample_ids: Sequence[int]) -> list[GenerationRequest]:
        """Abort requests and return them with their tokens so far as the prefix.

        Local; equal within an engine group.
        """
        found = []
        for sample_id in sample_ids:
            request, name = self._open.pop(sample_id), self._names.pop(sample_id)
            here = self._latest.pop(sample_id, None)
            if here is not None:
                request = replace(
                    request,
                    prefix_tokens=(*request.prefix_tokens, *here.token_ids),
                    prefix_logprobs=(*request.prefix_logprobs, *sampled_logprobs(here)),
                    stream=self._port.stream(name),
                )
            found.append(request)
        self._port.abort([str(sample_id) for sample_id in sample_ids])
        return found
