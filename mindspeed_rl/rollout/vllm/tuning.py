"""Checks of the flags of the engine's execution."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rl.config.engine_tuning import EngineTuningConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.rollout.expert_map import read_expert_map
from mindspeed_rl.rollout.graph_sizes import AUTO


def check_tuning(
    tuning: EngineTuningConfig, engine: EngineLayout, spec: ModelSpec
) -> tuple[int, ...]:
    """Validate, and read the map of experts.

    Returns:
        The expert in each physical slot; empty without ``--rollout-expert-map``.

    Raises:
        UsageError: naming the flag, its value, what is allowed and the fix.
    """
    sizes = tuning.rollout_graph_sizes
    if sizes and sizes != AUTO:
        given = f"--rollout-graph-sizes {' '.join(sizes)}"
        if not all(size.isdigit() and int(size) for size in sizes):
            raise UsageError(f"{given}: allowed are auto alone, or numbers above 0")
        if tuning.rollout_graph_mode == "eager":
            raise UsageError(
                f"{given}: there are no graphs with --rollout-graph-mode eager; choose another "
                "mode, or auto to print what graphs would waste"
            )
    if tuning.rollout_multistream_moe and not spec.moe:
        raise UsageError("--rollout-multistream-moe: the model has no experts; remove the flag")
    if not tuning.rollout_expert_map:
        return ()
    if not engine.expert_parallel:
        raise UsageError(
            f"--rollout-expert-map {tuning.rollout_expert_map}: needs experts that are spread over "
            "ranks; set --rollout-ep to --rollout-tp x --rollout-dp"
        )
    return read_expert_map(Path(tuning.rollout_expert_map), spec.num_experts, engine.ep)
