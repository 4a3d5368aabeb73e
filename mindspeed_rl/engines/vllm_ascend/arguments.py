"""Translates our engine flags into arguments of vLLM-Ascend.

vLLM-Ascend reads ``additional_config`` with defaults and ignores unknown keys without a message, so
a key of another version has no effect and no error. A test compares every key here with those that
the sources of the pinned version read (``tests/unit/engines/test_ascend_arguments.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mindspeed_rl.compat.ascend_builds import overwrites_cache, rl_config_problem
from mindspeed_rl.config.rollout import EngineTuningConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.graph_sizes import AUTO
from mindspeed_rl.engines.vllm.arguments import merged, model_settings
from mindspeed_rl.weight_layouts.rollout import RolloutLayout

# Weights stay in the plain format ND; weight updates read this besides the key weight_nz_mode.
ENVIRONMENT = {"VLLM_ASCEND_ENABLE_NZ": "0"}
_ADDITIONAL = "additional_config"
# Keys of config.json that mark a model whose attention cannot be updated.
_SPARSE_KEYS = ("index_topk", "index_head_dim", "compress_ratios")
_GRAPHS = {
    "piecewise": "PIECEWISE",
    "full-decode": "FULL_DECODE_ONLY",
    "full-and-piecewise": "FULL_AND_PIECEWISE",
}


def ascend_arguments(
    tuning: EngineTuningConfig, sizes: tuple[int, ...] = (), *, copies: bool = False
) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for our flags, and those of every engine. Pure.

    Args:
        tuning: Flags of the engine's execution, with a graph mode other than ``auto``.
        sizes: Graph sizes to capture; empty leaves the engine's own.
        copies: Whether the map of experts has several copies of some, for which vLLM-Ascend has
            to make room itself.
    """
    assert tuning.rollout_graph_mode != "auto", "see graph_tuning"
    # Weights stay ND, CPUs are not bound, and every engine of a process reads its configuration.
    additional: dict[str, Any] = {
        "weight_nz_mode": 0,
        "enable_cpu_binding": False,
        "refresh": True,
        # Without the key a variable of the environment decides, which the layout does not know.
        "enable_flashcomm1": tuning.rollout_flashcomm,
    }
    arguments: dict[str, Any] = {
        "enforce_eager": tuning.rollout_graph_mode == "eager",
        "additional_config": additional,
    }
    graphs: dict[str, Any] = {}
    if tuning.rollout_graph_mode != "eager":
        graphs["cudagraph_mode"] = _GRAPHS[tuning.rollout_graph_mode]
    if sizes:
        graphs["cudagraph_capture_sizes"] = list(sizes)
    if graphs:
        arguments["compilation_config"] = graphs
    if tuning.rollout_chunked_prefill != "auto":
        arguments["enable_chunked_prefill"] = tuning.rollout_chunked_prefill == "on"
    if tuning.rollout_multistream_moe:
        additional["multistream_overlap_shared_expert"] = True
    if copies:
        additional["eplb_config"] = {"expert_map_path": tuning.rollout_expert_map}
    if tuning.rollout_dp_sync != "engine":
        additional["dp_allreduce_on_npu"] = True
    return arguments


def graph_tuning(
    tuning: EngineTuningConfig, dp: int, environ: Mapping[str, str]
) -> tuple[EngineTuningConfig, str]:
    """Replace ``auto`` by the best graph mode that the installed build supports; also say why.

    Sizes that were not given become ``auto``. Without vLLM-Ascend (a dry run elsewhere) the answer
    is that of the pinned version.

    Args:
        tuning: Flags of the engine's execution.
        dp: Data-parallel ranks of an engine.
        environ: Environment of the run.
    """
    eager = replace(tuning, rollout_graph_mode="eager")
    unused = " (so --rollout-graph-sizes is not used)" if tuning.rollout_graph_sizes else ""
    if environ.get("ASCEND_LAUNCH_BLOCKING", "0") == "1":
        return eager, f"ASCEND_LAUNCH_BLOCKING=1 excludes graphs{unused}"
    if dp > 1 and overwrites_cache():
        return eager, (
            f"in vllm-ascend 0.23.0 graphs exclude --rollout-dp above 1{unused}; install "
            "0.23.0.post1"
        )
    sizes = tuning.rollout_graph_sizes or AUTO
    graphs = replace(tuning, rollout_graph_mode="full-decode", rollout_graph_sizes=sizes)
    return graphs, "the default on NPUs; --rollout-graph-mode eager for a first run"


_REFUSED_KEYS: Mapping[str, str] = {
    "enable_flashcomm1": "the layout of the weights follows --rollout-flashcomm; use that flag",
    "enable_shared_expert_dp": "it switches on what --rollout-flashcomm does, of which the layout "
    "of the weights then knows nothing; use that flag",
    "enable_reduce_sample": "its log-probs are not those of the whole vocabulary",
    "enable_balance_scheduling": "engines tell each other how busy they are in a process that is "
    "not there when they run in the trainer's, so it has no effect",
    "dynamic_eplb": "experts would move away from where the reshard writes them",
    "enable_async_exponential": "it draws the random numbers of a step before the model has run, "
    "on another stream; that a request keeps its own draws was never shown",
    "multistream_overlap_gate": "it chooses experts on another stream and through other code than "
    "what updates were run with",
}


def _refuse_keys(additional: object) -> None:
    """Refuse keys of ``--vllm-additional-config``, at any depth, that make rollouts wrong."""
    for key, value in additional.items() if isinstance(additional, dict) else ():
        reason = rl_config_problem(value) if key == "rl_config" else _REFUSED_KEYS.get(key)
        if value and reason:
            raise UsageError(f"--vllm-additional-config {key}: {reason}; remove the key")
        _refuse_keys(value)


def merged_arguments(
    options: Mapping[str, object], layout: RolloutLayout, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` on NPUs, the user's options among them. Pure.

    Args:
        options: Options of the engine given by the user.
        layout: Layout of the engine's weights.
        arguments: Result of :func:`ascend_arguments`.

    Raises:
        UsageError: An option is refused, or ours has another value.
    """
    own = {
        **model_settings(layout, "npu"),
        **arguments,
        "enable_sleep_mode": True,
        "disable_custom_all_reduce": True,
    }
    if "enforce_eager" in options:
        raise UsageError("--vllm-enforce-eager: use --rollout-graph-mode")
    _refuse_keys(options.get(_ADDITIONAL))
    return merged(own, options, "--vllm")


def check_updatable(config: Mapping[str, Any], checkpoint: str) -> None:
    """Refuse models whose attention weights cannot be updated in vLLM-Ascend. Pure.

    Args:
        config: Content of the model's ``config.json``.
        checkpoint: Its folder, for the message.

    Raises:
        UsageError: The model has sparse attention (SFA, DSA).
    """
    config = config.get("text_config", config)
    if found := [key for key in _SPARSE_KEYS if config.get(key)]:
        raise UsageError(
            f"--hf-checkpoint {checkpoint}: sparse attention ({found[0]} in config.json); "
            "vLLM-Ascend throws the key/value up projection away once it has derived "
            "its products, so that no update can be written; allowed: models with dense or latent "
            "attention"
        )
