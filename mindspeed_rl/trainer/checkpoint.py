"""Saves and loads training checkpoints of a TrainEngine.

Tensors are stored in megatron-core's distributed format (``torch_dist``) in coordinates of the
whole model, and the optimizer's state as ``fully_reshardable``: another tensor, pipeline or data
parallel layout can load them. Random states belong to ranks and are loaded only by the same layout.
:mod:`mindspeed_rl.checkpoint.resume` keeps the folder's records.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from mindspeed_rl.checkpoint import resume
from mindspeed_rl.checkpoint.resume import CheckpointRecord, CompanionRecord
from mindspeed_rl.config.training import CheckpointConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.trainer.foreign_checkpoint import load_foreign
from mindspeed_rl.trainer.optimizer import torch_optimizers
from mindspeed_rl.trainer.patches import (
    adamw_step,
    local_write_results,
    reshardable_load,
    swapped_optimizer,
)
from mindspeed_rl.trainer.random_state import rng_state, set_rng_state
from mindspeed_rl.trainer.train_engine import TrainEngine

_OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}
# Bytes per parameter of the fp32 master weight and both moments.
_OPTIMIZER_BYTES = 12
_NO_PARAMETER = "no parameter of this rank"
_WEIGHTS_ALONE = "step, optimizer and data order start from the beginning"
_UNUSED = {
    "reference": "without --ref-update-interval the KL is to the first weights of the run again",
    "critic": "without --rl-advantage-estimator gae there is none to train",
}


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The state from which a run starts.

    Attributes:
        step: Number of steps of the run that are done.
        extra: The ``extra`` of :func:`save_checkpoint`; empty at a fresh start.
        notes: Messages for the user, one line each.
    """

    step: int
    extra: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def save_checkpoint(
    directory: str | os.PathLike[str],
    step: int,
    engine: TrainEngine,
    extra: Mapping[str, Any],
    *,
    with_optimizer: bool = True,
    with_rng: bool = True,
    companions: Mapping[str, TrainEngine] = MappingProxyType({}),
) -> Path:
    """Write ``directory/iter_<step>``, which becomes valid when all ranks have written.

    Collective: the world. Earlier checkpoints are not touched.

    Args:
        directory: Folder on a file system that all ranks see.
        step: Number of steps of the run that are done.
        engine: Engine of the policy.
        extra: State of the run beyond the trainer, as JSON; rank 0's is kept.
        with_optimizer: Whether to keep moments, master weights and their step.
        with_rng: Whether to keep every rank's random states.
        companions: Other models of the run by role; without an optimizer only weights.

    Returns:
        The folder of the new checkpoint.

    Raises:
        OSError: There is too little space, or some rank does not see the folder.
        UsageError: A complete checkpoint of this step exists.
    """
    local_write_results.apply()
    if dist.get_rank() == 0:
        needed = sum(_estimated_bytes(e, with_optimizer) for e in (engine, *companions.values()))
        folder = resume.begin(directory, step, needed)
        for role in companions:
            (folder / role).mkdir()
    dist.barrier()
    partial = resume.partial_path(directory, step)
    _check_shared(partial)
    every_rank = get_default_save_sharded_strategy("torch_dist")
    strategy = FullyParallelSaveStrategyWrapper(every_rank, _replicas())
    engine.platform.synchronize()  # state may still be on its way to the device or to the host
    for role, model in {"": engine, **companions}.items():
        optimizer = with_optimizer and (model is engine or model.optimizer is not None)
        state = _sharded_state(model, optimizer, with_rng and model is engine, loading=False)
        dist_checkpointing.save(state, str(partial / role), strategy)
    if dist.get_rank() == 0:
        record = CheckpointRecord(
            step=step,
            num_updates=engine.schedule.num_updates,
            model=_architecture(engine),
            layout=_layout(engine),
            optimizer=_optimizer_kind(engine) if with_optimizer else "",
            has_rng=with_rng,
            extra=extra,
            companions={r: _companion_record(e, with_optimizer) for r, e in companions.items()},
        )
        resume.commit(directory, record)
    dist.barrier()
    return resume.checkpoint_path(directory, step)


def _companion_record(engine: TrainEngine, with_optimizer: bool) -> CompanionRecord:
    trained = engine.optimizer is not None
    return CompanionRecord(
        num_updates=engine.schedule.num_updates if trained else 0,
        model=_architecture(engine),
        optimizer=_optimizer_kind(engine) if trained and with_optimizer else "",
    )


def load_checkpoint(
    directory: str | os.PathLike[str],
    engine: TrainEngine,
    options: CheckpointConfig,
    companions: Mapping[str, TrainEngine] = MappingProxyType({}),
) -> LoadedState:
    """Load the newest complete checkpoint of a folder. Collective: the world.

    An empty folder changes nothing: the run starts from the weights it has. With ``--finetune``
    only weights are loaded, including those of companions that are saved. The same holds for a
    converted checkpoint, and for one that Megatron or MindSpeed-LLM wrote.

    Raises:
        UsageError: The folder does not exist, or the checkpoint is of another model, lacks
            requested parts, or has optimizer states of another kind or division; the message names
            the flag that helps.
    """
    found = _agree_on_latest(directory)
    notes = [f"ignored {directory}/{line}" for line in found.ignored]
    if found.path is None and (source := load_foreign(directory, engine)):
        return LoadedState(0, {}, (f"{source}; {_WEIGHTS_ALONE}",))
    if found.path is None:
        notes.append(f"--load {directory} has no checkpoint: starting from --hf-checkpoint")
        return LoadedState(0, {}, tuple(notes))
    record = resume.read_record(found.path)
    _check_model(engine, record, found.path)
    if resume.CONVERTED in record.extra:
        options = replace(options, finetune=True)
    with_optimizer = not (options.finetune or options.no_load_optim)
    with_rng = not (options.finetune or options.no_load_rng)
    if with_optimizer:
        _check_optimizer(engine, record, found.path)
        _check_optimizer_of_experts(_layout(engine)["ep"], record.layout["ep"], found.path)
    if with_rng and not record.has_rng:
        raise UsageError(f"{found.path} has no random states (--no-save-rng); add --no-load-rng")
    layout = _layout(engine)
    if with_rng and record.layout != layout:
        with_rng = False
        notes.append(
            f"random states start from --seed: the checkpoint's layout {_words(record.layout)} "
            f"is not this run's {_words(layout)}"
        )
    _load_tensors(found.path, engine, with_optimizer, with_rng)
    for role, companion in companions.items():
        notes += _load_companion(found.path, role, companion, record, options)
    for role in sorted(set(record.companions) - set(companions)):
        notes.append(
            f"{found.path} holds a {role} that this run does not take: "
            + _UNUSED.get(role, "it is left out")
        )
    if options.finetune:
        notes.append(f"weights of {found.path}; {_WEIGHTS_ALONE}")
        return LoadedState(0, {}, tuple(notes))
    engine.schedule.num_updates = record.num_updates
    notes.append(f"resuming after step {record.step} from {found.path}")
    return LoadedState(record.step, record.extra, tuple(notes))


def _load_companion(
    path: Path, role: str, engine: TrainEngine, record: CheckpointRecord, options: CheckpointConfig
) -> list[str]:
    """Load another model of the run and return notes for the user. Collective: the world.

    Raises:
        UsageError: A trained model is missing, of another architecture, or without its optimizer
            states.
    """
    kept, trained = record.companions.get(role), engine.optimizer is not None
    if kept is None and trained and not options.finetune:
        raise UsageError(
            f"{path} has no {role}: it was saved by a run without one; add --finetune to take the "
            "policy's weights and start from the beginning, or name a checkpoint of a run with one"
        )
    if kept is None:
        return [f"{path} has no {role}: it starts from its first weights"]
    _check_model(engine, kept, path)
    with_optimizer = trained and not (options.finetune or options.no_load_optim)
    if with_optimizer:
        _check_optimizer(engine, kept, path)
    _load_tensors(path / role, engine, with_optimizer, with_rng=False)
    if trained and not options.finetune:
        engine.schedule.num_updates = kept.num_updates
    return []


def _load_tensors(path: Path, engine: TrainEngine, with_optimizer: bool, with_rng: bool) -> None:
    """Load the weights and, if asked for, the optimizer and random states into the engine."""
    if not swapped_optimizer.is_used():
        adamw_step.apply()
    reshardable_load.apply()
    engine.platform.synchronize()  # a late copy would overwrite what is loaded
    strategy = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(str(path)), _replicas()
    )
    wanted = _sharded_state(engine, with_optimizer, with_rng, loading=True)
    state = dist_checkpointing.load(wanted, str(path), strategy)
    for key, module in _modules(engine).items():
        module.load_state_dict(state[key])
    if with_optimizer:
        _load_optimizer(engine, state["optimizer"])
    else:
        engine.reload_master_weights()
    if with_rng:
        set_rng_state(engine.platform, state["rng"])


def _sharded_state(
    engine: TrainEngine, with_optimizer: bool, with_rng: bool, *, loading: bool
) -> dict[str, Any]:
    """Return this rank's tensors and their place in the model for megatron-core to save or fill."""
    state: dict[str, Any] = {
        key: module.sharded_state_dict() for key, module in _modules(engine).items()
    }
    if with_optimizer:
        _initialize_optimizer_state(engine)
        state["optimizer"] = engine.optimizer.sharded_state_dict(
            state, is_loading=loading, metadata=_OPTIMIZER_FORMAT
        )
        _share_common_step(state["optimizer"])
    if with_rng:
        place = ((dist.get_world_size(),), (dist.get_rank(),))
        state["rng"] = ShardedObject("rng", rng_state(engine.platform), *place)
    return state


def _initialize_optimizer_state(engine: TrainEngine) -> None:
    """Give torch's AdamW its state before the first update, as the first update would.

    megatron-core reads the common step from that state when it saves and when it loads. The
    distributed optimizer of experts on a stage that has none, and of a share without parameters,
    gets the step of the others.
    """
    optimizers = torch_optimizers(engine.optimizer)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if not optimizer.state[param]:
                    optimizer.state[param] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
    if engine.models[0].ddp_config.use_distributed_optimizer:
        _give_empty_optimizers_a_step(optimizers)


def _give_empty_optimizers_a_step(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Add a state that belongs to no parameter, as torch's optimizers allow."""
    steps = [
        state["step"]
        for optimizer in optimizers
        for param, state in optimizer.state.items()
        if isinstance(param, torch.Tensor) and "step" in state
    ]
    for optimizer in optimizers:
        if steps and not any(group["params"] for group in optimizer.param_groups):
            states: dict[Any, Any] = optimizer.state
            states[_NO_PARAMETER] = {"step": steps[0].clone()}


def _share_common_step(state: dict[Any, Any]) -> None:
    """Give the step to the optimizer of experts on a stage that has none.

    Of what is no tensor rank 0's is saved, for the stages with experts, too. Only where the
    optimizer is not distributed: there the step is beside the state of the parameters.
    """
    states = _states_of(state)
    steps = [found["common_step"] for found in states if "common_step" in found]
    for found in states:
        if steps:
            found.setdefault("common_step", steps[0])


def _states_of(state: dict[Any, Any]) -> list[dict[Any, Any]]:
    """Return the states of the parameters of every chained optimizer that is not distributed."""
    chained = state.values() if all(isinstance(key, int) for key in state) else (state,)
    # In fp32 a part is torch's optimizer's own state dict.
    parts = (part.get("optimizer", part) for part in chained)
    return [part["state"] for part in parts if "state" in part]


def _load_optimizer(engine: TrainEngine, state: dict[str, Any]) -> None:
    """Load moments, master weights and step; hyperparameters keep the values of the flags."""
    optimizers = torch_optimizers(engine.optimizer)
    flags = [
        [
            {k: v for k, v in group.items() if k not in ("params", "step")}
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]
    _restore_step_of_0(state)
    engine.optimizer.load_state_dict(state)
    for optimizer, groups in zip(optimizers, flags, strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        for param_state in optimizer.state.values():
            # megatron-core gives all parameters one step tensor, which AdamW would advance once per
            # parameter.
            if "step" in param_state:  # MindSpeed's AdamW keeps one in each group of parameters
                param_state["step"] = param_state["step"].clone()


def _restore_step_of_0(state: dict[Any, Any]) -> None:
    """Add the step to the state of parameters where it is 0, before the first update.

    megatron-core leaves it out of a checkpoint then, and torch's AdamW refuses a state without it.
    """
    for states in _states_of(state):
        if "common_step" not in states:
            for param_state in states.values():
                param_state.setdefault("step", torch.tensor(0.0))


def _agree_on_latest(directory: str | os.PathLike[str]) -> resume.Found:
    """Return the latest checkpoint that rank 0 finds, even on a slow file system. Collective.

    Raises:
        UsageError: On all ranks, with the problem that rank 0 found.
    """
    answer: list[resume.Found | UsageError | None] = [None]
    if dist.get_rank() == 0:
        try:
            answer[0] = resume.find_latest(directory)
        except UsageError as error:
            answer[0] = error
    dist.broadcast_object_list(answer, 0)
    found = answer[0]
    if isinstance(found, UsageError):
        raise found
    assert found is not None
    return found


def _check_shared(partial: Path) -> None:
    """Check that every rank sees the folder that rank 0 made. Collective: the world."""
    seen = gather_objects(partial.is_dir())
    if not all(seen):
        raise OSError(
            f"--save {partial.parent}: rank {seen.index(False)} does not see {partial.name}, which "
            "rank 0 made; name a folder on a file system that all nodes share"
        )


def _check_model(
    engine: TrainEngine, record: CheckpointRecord | CompanionRecord, path: Path
) -> None:
    mine = _architecture(engine)
    wrong = [
        f"{name} {record.model.get(name)} (model: {value})"
        for name, value in mine.items()
        if record.model.get(name) != value and name != "num_mtp_layers"  # never built
    ]
    flag = "--critic-hf-checkpoint" if engine.role == "critic" else "--hf-checkpoint"
    if wrong:
        raise UsageError(
            f"{path} is of another model than {flag}: {', '.join(wrong)}; name the {flag} that "
            "the run started from"
        )


def _check_optimizer(
    engine: TrainEngine, record: CheckpointRecord | CompanionRecord, path: Path
) -> None:
    if not record.optimizer:
        raise UsageError(f"{path} has no optimizer states (--no-save-optim); add --no-load-optim")
    mine = _optimizer_kind(engine)
    if record.optimizer != mine:
        raise UsageError(
            f"{path} has the states of another optimizer ({record.optimizer}; this run: {mine}); "
            "set --use-distributed-optimizer and --bf16 as in the saved run, or add --no-load-optim"
        )


def _check_optimizer_of_experts(mine: int, saved: int, path: Path) -> None:
    """Refuse to divide or join optimizers.

    With expert parallelism megatron-core has one optimizer for experts and one for the rest, whose
    groups of parameters and names of tensors in a checkpoint differ from those of a single one.
    """
    if (mine > 1) != (saved > 1):
        raise UsageError(
            f"{path} was saved with --expert-model-parallel-size {saved}, this run has {mine}: "
            "above 1 experts have an optimizer of their own, and its state cannot be divided or "
            f"joined; keep {'a size above 1' if saved > 1 else 'the size 1'}, or add "
            "--no-load-optim"
        )


def _architecture(engine: TrainEngine) -> dict[str, Any]:
    """Return the fields of the spec in types that JSON keeps."""
    fields = asdict(engine.spec)
    return json.loads(json.dumps(fields))  # type: ignore[no-any-return]


def _layout(engine: TrainEngine) -> dict[str, int]:
    layout = engine.layout.parallel
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "dp": layout.dp}
    return sizes | {"vpp": layout.stages.vpp, "ep": layout.ep, "etp": layout.etp}


def _modules(engine: TrainEngine) -> dict[str, Any]:
    """Return the chunks of this rank by megatron-core's keys."""
    if len(engine.modules) == 1:
        return {"model": engine.modules[0]}
    return {f"model{i}": module for i, module in enumerate(engine.modules)}


def _words(layout: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in layout.items())


def _optimizer_kind(engine: TrainEngine) -> str:
    sharded = engine.models[0].ddp_config.use_distributed_optimizer
    precision = "bf16 with fp32 masters" if engine.modules[0].config.bf16 else "fp32"
    return f"{'distributed ' if sharded else ''}AdamW, {precision}"


def _replicas() -> dist.ProcessGroup:
    """Return the group of ranks with the same weights; each reads and writes a part of them."""
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def _estimated_bytes(engine: TrainEngine, with_optimizer: bool) -> int:
    num_parameters = sum(math.prod(shape) for shape in engine.layout.hf_shapes.values())
    weight_bytes = 2 if engine.modules[0].config.bf16 else 4
    return num_parameters * (weight_bytes + (_OPTIMIZER_BYTES if with_optimizer else 0))
