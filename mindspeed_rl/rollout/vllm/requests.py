"""Translates our requests and settings into vLLM's, and its outputs into completions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_rl.core.types import FINISH_REASONS, Completion
from mindspeed_rl.rollout.requests import SamplingSettings
from mindspeed_rl.rollout.vllm.patches.sampling_stream import STREAM, stream_of
from mindspeed_rl.weights.layouts.rollout import RolloutLayout


def model_settings(layout: RolloutLayout, platform: str) -> dict[str, Any]:
    """Return arguments of ``vllm.LLM`` for the model, its layout and the platform."""
    engine, layers = layout.engine, layout.spec.layers
    settings: dict[str, Any] = {}
    if platform == "cpu":
        # vLLM rewinds the generator of a request whose prompt is read in parts, which a CPU
        # generator does not support ("CPU Generator does not use offset").
        settings["enable_chunked_prefill"] = False
        if layout.spec.latent_attention:
            # vLLM's CPU kernel rotates the queries of latent attention wrongly, without an error.
            settings["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    if platform == "cuda" and layout.spec.expert_layers:
        # FlashInfer's kernels swap or shuffle the halves of an expert when it is loaded.
        settings["moe_backend"] = "triton"
    if engine.dp > 1:
        settings["data_parallel_size"] = engine.dp
    if engine.expert_parallel:
        settings["enable_expert_parallel"] = True
    if any(layer.moe and layer.moe.router_bias for layer in layers):
        # transformers 5 leaves both out of config.json, and vLLM would silently route by softmax.
        settings["hf_overrides"] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return settings


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
        ignore_eos=False,
        logprobs=0,
        detokenize=False,
        output_kind=kind,
        skip_clone=True,  # VllmPort.add copies them; a deep copy per request is expensive
    )


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


class VllmPort:
    """Adds and aborts single requests of vLLM's ``LLMEngine``, all with equal settings.

    Args:
        engine: vLLM's ``LLMEngine``.
        settings: Sampling settings of all requests.
        follow: Whether each step also outputs unfinished requests.
    """

    def __init__(self, engine: Any, settings: SamplingSettings, follow: bool) -> None:
        self._engine = engine
        self._base = sampling_params(settings, follow)

    def add(
        self,
        key: str,
        token_ids: list[int],
        seed: int,
        max_tokens: int,
        stream: torch.Tensor | None,
    ) -> str:
        """Start a request, with ``stream`` as the state of its generator; return vLLM's name."""
        from vllm.inputs.engine import tokens_input

        params = copy.copy(self._base)
        params.seed, params.max_tokens = seed, max_tokens
        if stream is not None:
            params.extra_args = {STREAM: stream}
        prompt = tokens_input(prompt_token_ids=token_ids)
        return str(self._engine.add_request(key, prompt, params))

    def abort(self, keys: list[str]) -> None:
        self._engine.abort_request(keys)

    def stream(self, name: str) -> torch.Tensor | None:
        """Return the generator state of a request by vLLM's name; ``None`` before it starts."""
        return stream_of(self._engine.model_executor.driver_worker.worker.model_runner, name)


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
    """Return the log-probs of the sampled tokens of one request, finished or not."""
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return tuple(entry[token].logprob for token, entry in pairs)
