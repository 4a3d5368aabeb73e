"""Translates our engine flags into arguments of vLLM-Ascend.

vLLM-Ascend reads ``additional_config`` with defaults and ignores unknown keys without a message, so
a key of another version has no effect and no error. A test compares every key here with those that
the sources of the pinned version read (``tests/unit/rollout/test_ascend_arguments.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mindspeed_rl.config.ascend_builds import overwrites_cache
from mindspeed_rl.config.rollout import EngineTuningConfig
from mindspeed_rl.rollout.graph_sizes import AUTO

# Weights stay in the plain format ND; weight updates read this besides the key weight_nz_mode.
ENVIRONMENT = {"VLLM_ASCEND_ENABLE_NZ": "0"}
_GRAPHS = {
    "piecewise": "PIECEWISE",
    "full-decode": "FULL_DECODE_ONLY",
    "full-and-piecewise": "FULL_AND_PIECEWISE",
}


def ascend_arguments(tuning: EngineTuningConfig, sizes: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for our flags, and those of every engine. Pure.

    Args:
        tuning: Flags of the engine's execution, with a graph mode other than ``auto``.
        sizes: Graph sizes to capture; empty leaves the engine's own.
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
    if tuning.rollout_expert_map:
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
