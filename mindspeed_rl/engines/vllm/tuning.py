"""Checks the flags of the engine's execution and reads the map of experts."""

from __future__ import annotations

import json
from pathlib import Path

from mindspeed_rl.config.rollout import EngineTuningConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.graph_sizes import AUTO
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.models.spec import ModelSpec


def check_tuning(
    tuning: EngineTuningConfig, engine: EngineLayout, spec: ModelSpec
) -> tuple[int, ...]:
    """Check the flags of the engine's execution, and read the map of experts.

    Returns:
        The expert in each physical slot; empty without ``--rollout-expert-map``.

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
    if not tuning.rollout_expert_map:
        return ()
    if not engine.expert_parallel:
        raise UsageError(
            f"--rollout-expert-map {tuning.rollout_expert_map}: needs experts that are spread over "
            "ranks; set --rollout-ep to --rollout-tp x --rollout-dp"
        )
    return read_expert_map(Path(tuning.rollout_expert_map), spec.num_experts, engine.ep)


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


def read_expert_map(path: Path, num_experts: int, ep: int) -> tuple[int, ...]:
    """Return the expert in each physical slot, slots in order over the ranks that share a layer.

    The layout of the weights has one placement for all layers, so the layers of the file must
    agree.

    Args:
        path: JSON file with ``layer_list[].device_list[].device_expert``.
        num_experts: Number of experts in a layer of the model.
        ep: Number of ranks that share the experts of a layer.

    Raises:
        UsageError: The file is no such map, its layers differ, or it is not for this model and
            ``ep``.
    """
    name = f"--rollout-expert-map {path}"
    try:
        layers = json.loads(path.read_text())["layer_list"]
        placements = {
            tuple(tuple(int(e) for e in device["device_expert"]) for device in layer["device_list"])
            for layer in layers
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{name}: not a map of experts ({type(error).__name__}: {error}); it needs "
            "layer_list, and device_list with device_expert in every layer"
        ) from error
    if len(placements) != 1:
        raise UsageError(
            f"{name}: its layers place experts in {len(placements)} ways; allowed is one way for "
            "all layers, because a reshard has one layout of the experts"
        )
    (devices,) = placements
    slots = tuple(expert for device in devices for expert in device)
    uneven = len({len(device) for device in devices}) > 1
    if len(devices) != ep or uneven or set(slots) != set(range(num_experts)):
        raise UsageError(
            f"{name}: {len(devices)} devices with {len(slots)} experts; needed are --rollout-ep "
            f"{ep} devices with equally many, among them each of the model's {num_experts} experts"
        )
    return slots
