"""Arguments of vLLM on CPU and CUDA, and what of the user's contradicts them. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mindspeed_rl.config.rollout import EngineTuningConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.engines.vllm.capabilities import CAPABILITIES
from mindspeed_rl.engines.vllm.cuda_arguments import cuda_arguments
from mindspeed_rl.weight_layouts.rollout import RolloutLayout

# Flags of the engine's execution that work on every platform.
_EVERYWHERE = (
    *("rollout_graph_count", "rollout_dp_sync", "rollout_dp_sync_interval"),
    "rollout_expert_map",
)
# Values that ask for no graph here.
_HARMLESS = (("rollout_graph_mode", "eager"), ("rollout_graph_sizes", ("auto",)))
_ON_CUDA = ("rollout_graph_mode", "rollout_graph_sizes")


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


def check_host_tuning(tuning: EngineTuningConfig, platform: str) -> None:
    """Refuse flags of the engine's execution that vLLM on CPU or CUDA does not have. Pure.

    Raises:
        UsageError: A flag needs vLLM-Ascend; names it.
    """
    for field in dataclasses.fields(tuning):
        value = getattr(tuning, field.name)
        harmless = (field.name, value) in _HARMLESS
        known = (*_EVERYWHERE, *(_ON_CUDA if platform == "cuda" else ()))
        if value != field.default and field.name not in known and not harmless:
            raise UsageError(
                f"--{field.name.replace('_', '-')}: needs vLLM-Ascend, this is {platform}; remove "
                "the flag, or give vLLM's own option as --vllm-*"
            )
    if tuning.rollout_dp_sync == "packed" and not CAPABILITIES[platform].packed_sync:
        raise UsageError(f"--rollout-dp-sync packed: not with vLLM on {platform}; use engine")


def host_arguments(
    options: Mapping[str, object],
    layout: RolloutLayout,
    platform: str,
    tuning: EngineTuningConfig,
    sizes: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` on CPU or CUDA, the user's options among them. Pure.

    Args:
        options: Options of the engine given by the user.
        layout: Layout of the engine's weights.
        platform: ``"cpu"`` or ``"cuda"``.
        tuning: Flags of the engine's execution.
        sizes: Graph sizes to capture on CUDA; empty leaves the engine's own.

    Raises:
        UsageError: An option is set by model and platform.
    """
    own = model_settings(layout, platform)
    if platform == "cuda":
        if "enforce_eager" in options:
            raise UsageError("--vllm-enforce-eager: use --rollout-graph-mode")
        return merged(own | cuda_arguments(tuning, sizes), options, "--vllm")
    if clash := sorted(set(own) & set(options)):
        raise UsageError(
            f"--vllm-{clash[0].replace('_', '-')}: model and platform need a value of their "
            f"own ({own[clash[0]]}); remove the flag"
        )
    return own | dict(options)


def merged(own: dict[str, Any], options: Mapping[str, object], prefix: str) -> dict[str, Any]:
    """Merge nested dictionaries, and refuse a value that both set differently. Pure.

    Raises:
        UsageError: An option has another value than ours.
    """
    found = dict(own)
    for name, value in options.items():
        flag = f"{prefix}-{name.replace('_', '-')}" if prefix == "--vllm" else f"{prefix}.{name}"
        if name not in found:
            found[name] = value
        elif isinstance(found[name], dict) and isinstance(value, dict):
            found[name] = merged(found[name], value, flag)
        elif found[name] != value:
            raise UsageError(
                f"{flag}: training and updates need {found[name]!r}, or a flag of ours sets it; "
                "remove it"
            )
    return found
