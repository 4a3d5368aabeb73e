"""Checks the flags of the engine's execution, and places experts as the user's map has them."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rl.config.rollout import EngineTuningConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.graph_sizes import AUTO
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.expert_placement.map_file import read_expert_map
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.weight_layouts.rollout import RolloutLayout, Slots


def check_tuning(tuning: EngineTuningConfig, engine: EngineLayout, spec: ModelSpec) -> None:
    """Check the flags of the engine's execution.

    Raises:
        UsageError: A flag does not fit the model or the engine.
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
    if tuning.rollout_multistream_moe and not spec.expert_layers:
        raise UsageError("--rollout-multistream-moe: the model has no experts; remove the flag")
    if tuning.rollout_flashcomm:
        _check_flashcomm(sizes, engine, spec)


def mapped_experts(
    tuning: EngineTuningConfig, engine: EngineLayout, spec: ModelSpec
) -> tuple[Slots, tuple[tuple[int, Slots], ...]]:
    """Return where ``--rollout-expert-map`` puts experts, as a layout of the weights has it.

    Returns:
        The expert in each slot of a layer, empty where every expert is there once and in order;
        and the same for the layers with other places.

    Raises:
        UsageError: Experts are not spread over ranks, or the map is not for the model.
    """
    if not tuning.rollout_expert_map:
        return (), ()
    if not spec.expert_layers:
        raise UsageError(
            f"--rollout-expert-map {tuning.rollout_expert_map}: the model has no experts; remove "
            "the flag"
        )
    if not engine.expert_parallel:
        raise UsageError(
            f"--rollout-expert-map {tuning.rollout_expert_map}: needs experts that are spread over "
            "ranks; set --rollout-ep to --rollout-tp x --rollout-dp"
        )
    path, layers = Path(tuning.rollout_expert_map), spec.expert_layers
    found = read_expert_map(path, layers, spec.num_experts, engine.ep)
    common = found[0][1] if len(found[0][1]) > spec.num_experts else ()
    usual = common or tuple(range(spec.num_experts))
    return common, tuple((layer, slots) for layer, slots in found if slots != usual)


def check_copies(layout: RolloutLayout, tuning: EngineTuningConfig, platform: str) -> None:
    """Refuse a map with several copies of an expert, for which vLLM itself makes no room. Pure.

    Raises:
        UsageError: The layout has copies.
    """
    if layout.physical_experts:
        raise UsageError(
            f"--rollout-expert-map {tuning.rollout_expert_map}: it has several copies of some "
            f"experts, which needs vLLM-Ascend, and this is {platform}; give a map with every "
            "expert once"
        )


def _check_flashcomm(sizes: tuple[str, ...], engine: EngineLayout, spec: ModelSpec) -> None:
    """Refuse ``--rollout-flashcomm`` where vLLM-Ascend 0.23 asserts or drops graph sizes."""
    if engine.tp == 1:
        raise UsageError(
            "--rollout-flashcomm: it distributes tokens over the tensor-parallel ranks of an "
            "engine, and --rollout-tp is 1; remove the flag, or set --rollout-tp above 1"
        )
    if spec.expert_layers and not engine.expert_parallel:
        raise UsageError(
            "--rollout-flashcomm: vLLM-Ascend has it for experts that are spread over ranks alone; "
            f"set --rollout-ep to --rollout-tp x --rollout-dp ({engine.size}), or remove the flag"
        )
    if uneven := [size for size in sizes if size.isdigit() and int(size) % engine.tp]:
        raise UsageError(
            f"--rollout-graph-sizes {' '.join(uneven)}: with --rollout-flashcomm vLLM-Ascend "
            f"captures multiples of --rollout-tp {engine.tp} alone; give such sizes"
        )
