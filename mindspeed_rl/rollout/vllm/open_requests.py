"""The requests that an engine of this rank has not finished, and how they leave and arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mindspeed_rl.core.types import Completion
from mindspeed_rl.rollout.engine import GenerationRequest
from mindspeed_rl.rollout.vllm.patches.routed_experts import ExpertRecorder
from mindspeed_rl.rollout.vllm.requests import VllmPort, completion


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request on its way to another engine, or one that has not been anywhere.

    Attributes:
        request: as it was made.
        token_ids: generated so far, over all engines.
        logprobs: of those.
        stream: state of its random generator, uint8; ``None``: its seed says.
    """

    request: GenerationRequest
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    stream: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is.

    Attributes:
        sample_id: whose.
        context: tokens of its prompt and generated so far.
        generated: tokens so far, over all engines.
        computed: it has tokens of this engine.
    """

    sample_id: int
    context: int
    generated: int
    computed: bool


class OpenRequests:
    """The unfinished requests of one call of ``generate``.

    Args:
        port: to the engine.
        max_tokens: limit of a response that has none of its own.
        experts: completions take theirs along; every request must then end where it began.
    """

    def __init__(
        self, port: VllmPort, max_tokens: int, experts: ExpertRecorder | None = None
    ) -> None:
        self._port = port
        self._limit = max_tokens
        self._experts = experts
        if experts is not None:
            experts.clear()
        self._open: dict[int, OpenRequest] = {}
        self._names: dict[int, str] = {}
        self._latest: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, open_requests: Iterable[OpenRequest]) -> None:
        """Start them, or let them go on."""
        for open_request in open_requests:
            request = open_request.request
            limit = self._limit if request.max_tokens is None else request.max_tokens
            self._names[request.sample_id] = self._port.add(
                str(request.sample_id),
                [*request.token_ids, *open_request.token_ids],
                request.seed,
                limit - len(open_request.token_ids),
                open_request.stream,
            )
            self._open[request.sample_id] = open_request

    def note(self, outputs: Iterable[Any]) -> None:
        """What a step of the engine gave, finished or not."""
        for output in outputs:
            self._latest[int(output.request_id)] = output.outputs[0]

    def finish(self, outputs: Mapping[int, Any], version: int) -> dict[int, Completion]:
        """The completions of requests that a step has finished, whatever engines they were on.

        Raises:
            RuntimeError: vLLM gave one up.
        """
        found = {}
        for sample_id, output in outputs.items():
            open_request = self._open.pop(sample_id)
            name = self._names.pop(sample_id)
            self._latest.pop(sample_id, None)
            last = completion(output.outputs[0], sample_id, version)
            experts = None
            if self._experts is not None:
                assert not open_request.token_ids, "experts of a request that was on other engines"
                before = (
                    len(open_request.request.token_ids) - 1
                )  # where the first token is predicted
                experts = self._experts.take(name, before, len(last.token_ids))
            found[sample_id] = replace(
                last,
                token_ids=(*open_request.token_ids, *last.token_ids),
                logprobs=(*open_request.logprobs, *last.logprobs),
                experts=experts,
            )
        return found

    def progress(self) -> list[Progress]:
        """Of every request, in the order of their start."""
        found = []
        for sample_id, open_request in self._open.items():
            here = self._latest.get(sample_id)
            generated = len(open_request.token_ids) + (0 if here is None else len(here.token_ids))
            context = len(open_request.request.token_ids) + generated
            found.append(Progress(sample_id, context, generated, here is not None))
        return found

    def take(self, sample_ids: Sequence[int]) -> list[OpenRequest]:
        """Give requests up with what they have so far. Local; alike on the ranks of an engine."""
        found = []
        for sample_id in sample_ids:
            open_request, name = self._open.pop(sample_id), self._names.pop(sample_id)
            here = self._latest.pop(sample_id, None)
            if here is not None:
                ids = tuple(here.token_ids)
                pairs = zip(ids, here.logprobs, strict=True)
                open_request = replace(
                    open_request,
                    token_ids=(*open_request.token_ids, *ids),
                    logprobs=(*open_request.logprobs, *(entry[t].logprob for t, entry in pairs)),
                    stream=self._port.stream(name),
                )
            found.append(open_request)
        self._port.abort([str(sample_id) for sample_id in sample_ids])
        return found
