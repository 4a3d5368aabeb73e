"""Requests as vLLM sees them: their settings, where they are while open, and what comes out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mindspeed_rl.core.types import FINISH_REASONS, Completion
from mindspeed_rl.engines.vllm.backend import ExpertSource
from mindspeed_rl.rollout.rebalance import ExpectedLength
from mindspeed_rl.rollout.rebalance_plan import Load
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings
from mindspeed_rl.rollout.stats import StepStats


def sampling_params(settings: SamplingSettings, follow: bool) -> Any:
    """Return vLLM's settings of a request, which fix every field that shapes the distribution.

    With ``follow`` each step also outputs unfinished requests, which takes time.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.CUMULATIVE if follow else RequestOutputKind.FINAL_ONLY
    return SamplingParams(
        n=1,
        temperature=settings.temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        max_tokens=settings.max_response_tokens,
        stop_token_ids=list(settings.stop_token_ids),
        ignore_eos=not settings.stop_token_ids,
        logprobs=0,
        flat_logprobs=True,  # lists of numbers; else a dict and an object per token
        detokenize=False,
        output_kind=kind,
        skip_clone=True,  # VllmPort.add copies them; a deep copy per request is expensive
    )


class VllmPort:
    """Adds and aborts single requests of vLLM's ``LLMEngine``, all with equal settings.

    Args:
        engine: vLLM's ``LLMEngine``, with its scheduler in this process.
        settings: Sampling settings of all requests.
        follow: Whether each step also outputs unfinished requests.
        stats: Counters of preemptions and of the caches to add to.
    """

    def __init__(
        self, engine: Any, settings: SamplingSettings, follow: bool, stats: StepStats
    ) -> None:
        self._engine = engine
        self._base = sampling_params(settings, follow)
        self._scheduler: Any = engine.engine_core.engine_core.scheduler
        self._stats = stats
        self._running: dict[str, Any] = {}  # vLLM's requests, which count their preemptions

    def add(
        self,
        key: str,
        token_ids: list[int],
        seed: int,
        max_tokens: int,
    ) -> str:
        """Start a request and return vLLM's name of it."""
        from vllm.inputs.engine import tokens_input

        params = copy.copy(self._base)
        params.seed, params.max_tokens = seed, max_tokens
        prompt = tokens_input(prompt_token_ids=token_ids)
        name = str(self._engine.add_request(key, prompt, params))
        self._running[key] = self._scheduler.requests[name]
        return name

    def abort(self, keys: list[str]) -> None:
        self._engine.abort_request(keys)
        for key in keys:
            request = self._running.pop(key)
            self._stats.preemptions += request.num_preemptions
            self._stats.sampled_tokens += request.num_output_tokens

    def observe(self, outputs: Iterable[Any]) -> None:
        """Add a step to the counters: its use of the cache, and the requests that it ended.

        vLLM's own statistics have the same numbers, at the cost of a record per request and step.
        """
        stats = self._stats
        stats.cache_use = max(stats.cache_use, float(self._scheduler.kv_cache_manager.usage))
        for output in outputs:
            if output.finished:
                stats.sampled_tokens += len(output.outputs[0].token_ids)
                stats.preemptions += self._running.pop(output.request_id).num_preemptions
                stats.prompt_tokens += len(output.prompt_token_ids)
                stats.cached_tokens += output.num_cached_tokens or 0


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
        port: VllmPort,
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
            )
            self._open[request.sample_id] = request
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
            name = self._names.pop(sample_id)
            self._latest.pop(sample_id, None)
            last = completion(output.outputs[0], sample_id, version)
            experts = None
            if self._experts is not None:
                assert not request.prefix_tokens, "experts of a request that was on other engines"
                first = len(request.token_ids) - 1  # the position that predicts the first token
                experts = self._experts.take(name, output.outputs[0], first, len(last.token_ids))
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
            request = self._open.pop(sample_id)
            self._names.pop(sample_id)
            here = self._latest.pop(sample_id, None)
            if here is not None:
                request = replace(
                    request,
                    prefix_tokens=(*request.prefix_tokens, *here.token_ids),
                    prefix_logprobs=(*request.prefix_logprobs, *sampled_logprobs(here)),
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


def score_params(temperature: float, with_entropy: bool) -> Any:
    """Return settings for prompt log-probs, with ``with_entropy`` of the whole vocabulary."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=1,
        temperature=temperature,
        seed=0,
        prompt_logprobs=-1 if with_entropy else 0,
        detokenize=False,
    )


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
