"""Requests as vLLM sees them: their settings, how they start, pause and end."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_rl.rollout.paused import PausedRequests
from mindspeed_rl.rollout.requests import SamplingSettings
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


@dataclass(frozen=True, slots=True)
class _Started:
    """A request of vLLM as it was when this call of the engine started or continued it.

    Attributes:
        request: vLLM's request, which counts its preemptions.
        preemptions: Preemptions by then.
        tokens: Tokens that vLLM had sampled for it by then.
        cached: With ``tokens``, those of all its tokens that were in the cache.
        pauses_at: Sampled tokens with which it pauses; ``None``: it ends in this call.
    """

    request: Any
    preemptions: int = 0
    tokens: int = 0
    cached: int = 0
    pauses_at: int | None = None


class VllmPort:
    """Adds and aborts single requests of vLLM's ``LLMEngine``, with equal settings but for few.

    Args:
        engine: vLLM's ``LLMEngine``, with its scheduler in this process.
        settings: Sampling settings of requests; one may have another limit and temperature.
        follow: Whether each step also outputs unfinished requests.
        stats: Counters of preemptions and of the caches to add to.
        paused: Requests of earlier calls, which keep their cache; ``None``: the engine keeps none.
    """

    def __init__(
        self,
        engine: Any,
        settings: SamplingSettings,
        follow: bool,
        stats: StepStats,
        paused: PausedRequests | None = None,
    ) -> None:
        self._engine = engine
        self._settings, self._follow = settings, follow
        self._bases: dict[float, Any] = {}  # vLLM's settings by temperature
        self._scheduler: Any = engine.engine_core.engine_core.scheduler
        self._stats = stats
        self._paused = paused
        self._alike = (follow, settings.temperature, settings.stop_token_ids)
        self._running: dict[str, _Started] = {}
        self._pausing: dict[str, _Started] = {}  # those of them that pause

    def add(
        self,
        key: str,
        token_ids: list[int],
        seed: int,
        max_tokens: int,
        temperature: float | None,
        *,
        watched: bool = False,
    ) -> str:
        """Start a request and return vLLM's name of it; ``None`` is the settings' temperature."""
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = copy.copy(self._base(temperature))
        params.seed, params.max_tokens = seed, max_tokens
        if watched:
            params.output_kind = RequestOutputKind.CUMULATIVE
        prompt = tokens_input(prompt_token_ids=token_ids)
        name = str(self._engine.add_request(key, prompt, params))
        self._running[key] = _Started(self._scheduler.requests[name])
        return name

    def add_part(
        self, key: str, token_ids: list[int], seed: int, max_tokens: int, later_tokens: int
    ) -> tuple[str, int]:
        """Start a request, or continue it if it has paused; see ``open_requests.Port``."""
        if self._paused is None:
            return self.add(key, token_ids, seed, max_tokens, None), 0
        before = 0
        request = self._paused.resume((*self._alike, tuple(token_ids)))
        if request is None:
            name = self.add(self._paused.new_name(), token_ids, seed, max_tokens, None)
            request = self._running.pop(name).request
        else:
            before = request.num_output_tokens
            self._paused.allow(request, seed, before + max_tokens)
            self._stats.resumed += 1
            self._stats.kept_cached_tokens += request.num_computed_tokens
        name = request.request_id
        self._paused.call(name, key)
        request.max_tokens = before + max_tokens + later_tokens
        started = _Started(
            request,
            request.num_preemptions,
            before,
            request.num_computed_tokens,
            before + max_tokens if later_tokens else None,
        )
        self._running[key] = started
        if later_tokens:
            self._pausing[key] = started
        return name, before

    def _base(self, temperature: float | None) -> Any:
        degree = self._settings.temperature if temperature is None else temperature
        if degree not in self._bases:
            settings = replace(self._settings, temperature=degree)
            self._bases[degree] = sampling_params(settings, self._follow)
        return self._bases[degree]

    def abort(self, keys: list[str]) -> None:
        self._engine.abort_request(keys)
        for key in keys:
            started = self._running.pop(key)
            self._pausing.pop(key, None)
            self._stats.preemptions += started.request.num_preemptions - started.preemptions
            self._stats.sampled_tokens += started.request.num_output_tokens - started.tokens

    def pause(self) -> list[Any]:
        """Pause the requests that have their tokens of this call, and return their outputs.

        They look like those of requests that ended at their limit. To be called after every step,
        before :meth:`observe`.
        """
        if self._paused is None:
            return []
        outputs = []
        for key, started in list(self._pausing.items()):
            request, most = started.request, started.pauses_at
            if request.is_finished():
                del self._pausing[key]
            elif request.num_output_tokens == most:
                del self._pausing[key]
                outputs.append(
                    self._paused.pause(request, (*self._alike, tuple(request.all_token_ids)))
                )
        self._paused.start_ready()
        return outputs

    def observe(self, outputs: Iterable[Any]) -> None:
        """Add a step to the counters: its use of the cache, and the requests that it ended.

        vLLM's own statistics have the same numbers, at the cost of a record per request and step.
        """
        stats = self._stats
        stats.cache_use = max(stats.cache_use, float(self._scheduler.kv_cache_manager.usage))
        for output in outputs:
            if output.finished:
                started = self._running.pop(output.request_id)
                stats.sampled_tokens += len(output.outputs[0].token_ids) - started.tokens
                stats.preemptions += started.request.num_preemptions - started.preemptions
                stats.prompt_tokens += len(output.prompt_token_ids) + started.tokens
                stats.cached_tokens += started.cached or output.num_cached_tokens or 0


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
