"""Arguments of vLLM on CUDA: its memory pool, graphs of decode steps, the runner. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.config.rollout import EngineTuningConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.weight_layouts.rollout import RolloutLayout

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Variable that chooses vLLM's model runner. From 0.32 on its default is version 2 where Triton is
installed, as it is beside every CUDA build; what this project reads of a runner is that of
version 1, which tests run on CPU."""
ENVIRONMENT = {RUNNER: "0"}
_GRAPHS = "full-decode"


def check_runner(environ: Mapping[str, str]) -> None:
    """Refuse an environment that chooses another runner. Pure.

    Raises:
        UsageError: It does; names the variable and its value.
    """
    value = environ.get(RUNNER, "0")
    if value.strip().lower() not in ("0", "false", ""):
        raise UsageError(
            f"{RUNNER}={value}: the engine needs vLLM's model runner V1, of which memory, sleep "
            f"and sampling are known; unset {RUNNER}"
        )


def check_cuda_graphs(tuning: EngineTuningConfig, layout: RolloutLayout) -> None:
    """Refuse graphs that would read what an update does not write. Pure.

    Raises:
        UsageError: The mode needs compiled models, or the model or the layout exclude graphs.
    """
    mode = tuning.rollout_graph_mode
    if mode in ("auto", "eager"):
        return
    if mode != _GRAPHS:
        raise UsageError(
            f"--rollout-graph-mode {mode}: on CUDA vLLM captures pieces of models that "
            "torch.compile has compiled, and engines here run them as they are; use "
            f"{_GRAPHS}, or eager"
        )
    if layout.spec.latent_attention:
        raise UsageError(
            f"--rollout-graph-mode {mode}: an update derives products of latent attention anew, in "
            "other memory than a graph reads; use eager"
        )
    if layout.engine.dp > 1:
        raise UsageError(
            f"--rollout-graph-mode {mode} with --rollout-dp {layout.engine.dp}: what idle ranks "
            "write during a captured step was not read on CUDA; use eager"
        )


def cuda_arguments(tuning: EngineTuningConfig, sizes: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` that every engine on CUDA has. Pure.

    Args:
        tuning: Flags of the engine's execution.
        sizes: Graph sizes to capture; empty leaves the engine's own.
    """
    arguments: dict[str, Any] = {"enable_sleep_mode": True, "enforce_eager": True}
    if tuning.rollout_graph_mode == _GRAPHS:
        # Without compilation: kernels are those of eager steps, and a start takes no minutes.
        graphs: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        if sizes:
            graphs["cudagraph_capture_sizes"] = list(sizes)
        arguments |= {"enforce_eager": False, "compilation_config": graphs}
    return arguments
