"""What a copy holds of the models of a rank: the same as a checkpoint, as it lies on the rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from mindspeed_rl.checkpoint.optimizer_state import initialize_state
from mindspeed_rl.core.digest import text_digest
from mindspeed_rl.trainer.optimizer import torch_optimizers
from mindspeed_rl.trainer.train_engine import TrainEngine
from mindspeed_rl.trainer_state.random_state import rng_state, set_rng_state

_STEP = "step"  # counted by parameters or, in some optimizers, by their groups


def tensors_of(engines: Mapping[str, TrainEngine]) -> dict[str, torch.Tensor]:
    """Return weights, master weights and moments of a rank by name; they are the live ones. Local.

    Master weights that are the weights themselves, or views of them, are left out.
    """
    found = {}
    for role, engine in engines.items():
        engine.platform.synchronize()  # state may still be on its way to the device or the host
        for name, tensor in _weights(engine).items():
            found[f"{role}.{name}"] = tensor
        for name, tensor in _optimizer_tensors(engine).items():
            found[f"{role}.{name}"] = tensor
    return found


def plain_of(engines: Mapping[str, TrainEngine]) -> dict[str, Any]:
    """Return the counters and random states of a rank, in types that ``torch.load`` trusts."""
    trained = {role: e for role, e in engines.items() if e.optimizer is not None}
    platform = next(iter(engines.values())).platform
    return {
        "updates": {role: engine.schedule.num_updates for role, engine in trained.items()},
        "steps": {role: _group_steps(engine) for role, engine in trained.items()},
        "rng": rng_state(platform),
    }


def restore(
    engines: Mapping[str, TrainEngine],
    tensors: Mapping[str, torch.Tensor],
    plain: Mapping[str, Any],
) -> None:
    """Put the state of a copy back. Local.

    Raises:
        KeyError: The copy lacks a tensor of this rank.
    """
    with torch.no_grad():
        for role, engine in engines.items():
            engine.platform.synchronize()
            for name, target in _weights(engine).items():
                target.copy_(tensors[f"{role}.{name}"])
            engine.reload_master_weights()  # rounded ones, which those of the copy replace
            engine.platform.synchronize()
            for name, target in _optimizer_tensors(engine).items():
                if f"{role}.{name}" in tensors or not name.endswith(f".{_STEP}"):
                    target.copy_(tensors[f"{role}.{name}"])
            engine.platform.synchronize()  # the copies read a file that may be removed
    for role, updates in plain["updates"].items():
        engines[role].schedule.num_updates = updates
        _set_group_steps(engines[role], plain["steps"][role])
    set_rng_state(next(iter(engines.values())).platform, plain["rng"])


def run_digest(engines: Mapping[str, TrainEngine], rank: int, world: int) -> str:
    """Return a digest of what must be equal where a copy is loaded: models, layout, precision."""
    facts: list[Any] = [rank, world]
    for role, engine in engines.items():
        shapes = {n: (str(t.dtype), list(t.shape)) for n, t in _weights(engine).items()}
        facts += [role, asdict(engine.spec), str(engine.layout.parallel), shapes]
        facts.append(engine.optimizer is not None and _is_sharded(engine))
    return text_digest(json.dumps(facts, default=str))


def _weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {
        f"{chunk}.{name}": value.detach()
        for chunk, module in enumerate(engine.modules)
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def _optimizer_tensors(engine: TrainEngine) -> dict[str, torch.Tensor]:
    if engine.optimizer is None:
        return {}
    optimizers = torch_optimizers(engine.optimizer)
    initialize_state(optimizers, distributed=_is_sharded(engine))
    weights = {t.untyped_storage().data_ptr() for t in _weights(engine).values()}
    parts = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    found = {}
    for number, part in enumerate(parts):
        on_host = getattr(part, "param_to_cpu_states_map", {})  # of MindSpeed's --swap-optimizer
        for place, param in _params(part.optimizer):
            values = {"param": param, **part.optimizer.state[param]}
            for key, value in values.items():
                if not isinstance(value, torch.Tensor):
                    continue
                swapped = value.nbytes and not value.untyped_storage().nbytes()
                kept = on_host[param][key] if swapped else value
                is_weight = kept.untyped_storage().data_ptr() in weights and kept.nbytes
                if key != "param" or not is_weight:
                    found[f"optimizer.{number}.{place}.{key}"] = kept.detach()
    return found


def _is_sharded(engine: TrainEngine) -> bool:
    return bool(engine.models[0].ddp_config.use_distributed_optimizer)


def _params(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{g}.{p}", param)
        for g, group in enumerate(optimizer.param_groups)
        for p, param in enumerate(group["params"])
    ]


def _group_steps(engine: TrainEngine) -> list[list[int | None]]:
    """Return the counters of groups of parameters; ``None`` where parameters count."""
    return [
        [int(group[_STEP]) if _STEP in group else None for group in optimizer.param_groups]
        for optimizer in torch_optimizers(engine.optimizer)
    ]


def _set_group_steps(engine: TrainEngine, steps: list[list[int | None]]) -> None:
    for optimizer, of_groups in zip(torch_optimizers(engine.optimizer), steps, strict=True):
        for group, step in zip(optimizer.param_groups, of_groups, strict=True):
            if step is not None:
                group[_STEP] = step
