"""Saves and loads training checkpoints of a TrainEngine.

Tensors are stored in megatron-core's distributed format (``torch_dist``) in coordinates of the
whole model, and the optimizer's state as ``fully_reshardable``: another tensor, pipeline or data
parallel layout can load them. Each rank writes the states that it owns. Random states belong to
ranks and are loaded only by the same layout.
:mod:`mindspeed_rl.checkpoint.resume` keeps the folder's records.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
)
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)

from mindspeed_rl.adapters.plan import adapter_shapes
from mindspeed_rl.checkpoint import resume
from mindspeed_rl.checkpoint.compatibility import ADAPTERS, check_model, check_optimizer
from mindspeed_rl.checkpoint.expert_optimizers import OPTIMIZER, regrouped, with_own_groups
from mindspeed_rl.checkpoint.finite import leaves, problems_of
from mindspeed_rl.checkpoint.newest_sound import (
    agree_on_sound,
    agreed_problems,
    plain_objects_only,
)
from mindspeed_rl.checkpoint.optimizer_shards import FORMAT, OptimizerShard, sharded_state
from mindspeed_rl.checkpoint.optimizer_state import (
    initialize_state,
    load_state,
    share_common_step,
)
from mindspeed_rl.checkpoint.record_tensors import separated, with_tensors
from mindspeed_rl.checkpoint.resume import CheckpointRecord, CompanionRecord
from mindspeed_rl.checkpoint.saving import UnwrittenCheckpoint, check_shared
from mindspeed_rl.checkpoint.tensor_files import tensor_name
from mindspeed_rl.config.training import CheckpointConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.trainer.optimizer import torch_optimizers
from mindspeed_rl.trainer.patches import swapped_optimizer
from mindspeed_rl.trainer.train_engine import TrainEngine
from mindspeed_rl.trainer_state.foreign_checkpoint import load_foreign
from mindspeed_rl.trainer_state.patches import adamw_step, reshardable_load
from mindspeed_rl.trainer_state.patches.planned_save import PlannedSave, SavePlans, states_of
from mindspeed_rl.trainer_state.random_state import rng_state, set_rng_state

# Bytes per parameter of the fp32 master weight and both moments.
_OPTIMIZER_BYTES = 12
_PLANS: WeakKeyDictionary[TrainEngine, SavePlans] = WeakKeyDictionary()
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
        damaged: Newer checkpoints that were found damaged.
    """

    step: int
    extra: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    damaged: tuple[Path, ...] = ()


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
        extra: State of the run beyond the trainer, as JSON has it, and tensors; rank 0's is kept.
        with_optimizer: Whether to keep moments, master weights and their step.
        with_rng: Whether to keep every rank's random states.
        companions: Other models of the run by role; without an optimizer only weights.

    Returns:
        The folder of the new checkpoint.

    Raises:
        FloatingPointError: Weights or optimizer states are not finite; nothing is kept.
        OSError: There is too little space, or some rank does not see the folder.
        UsageError: A complete checkpoint of this step exists.
    """
    unwritten = plan_checkpoint(
        directory,
        step,
        engine,
        extra,
        with_optimizer=with_optimizer,
        with_rng=with_rng,
        companions=companions,
    )
    unwritten.check_values()
    return unwritten.write()


def plan_checkpoint(
    directory: str | os.PathLike[str],
    step: int,
    engine: TrainEngine,
    extra: Mapping[str, Any],
    *,
    with_optimizer: bool,
    with_rng: bool,
    companions: Mapping[str, TrainEngine],
) -> UnwrittenCheckpoint:
    """Plan which rank writes what of a checkpoint; see :func:`save_checkpoint`.

    Collective: the world. The result refers to the live state of the models, of which nothing is
    sent.
    """
    needed = sum(estimated_bytes(e, with_optimizer) for e in (engine, *companions.values()))
    if dist.get_rank() == 0:
        folder = resume.begin(directory, step, needed)
        for role in companions:
            (folder / role).mkdir()
    dist.barrier()
    partial = resume.partial_path(directory, step)
    check_shared(partial)
    engine.platform.synchronize()  # state may still be on its way to the device or to the host
    parts = {}
    for role, model in {"": engine, **companions}.items():
        optimizer = with_optimizer and (model is engine or model.optimizer is not None)
        state, shards = _sharded_state(
            model, optimizer, with_rng and model is engine, loading=False
        )
        plans = _PLANS.setdefault(model, SavePlans(_replicas()))
        parts[role] = PlannedSave(state, partial / role, plans, shards)
    plain, tensors = separated(extra)
    record = CheckpointRecord(
        step=step,
        num_updates=engine.schedule.num_updates,
        model=_architecture(engine),
        layout=_layout(engine),
        optimizer=_optimizer_kind(engine) if with_optimizer else "",
        has_rng=with_rng,
        extra=plain,
        companions={r: _companion_record(e, with_optimizer) for r, e in companions.items()},
    )
    return UnwrittenCheckpoint(directory, record, parts, engine.platform, needed, tensors)


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
    before: int | None = None,
) -> LoadedState:
    """Load the newest sound checkpoint of a folder, of a step below ``before``.

    Collective: the world.

    One that is incomplete, whose bytes are not those that were written, or whose values are not
    finite, is named and an older one is taken. An empty folder changes nothing: the run starts from
    the weights it has. With ``--finetune`` only weights are loaded, including those of companions
    that are saved. The same holds for a converted checkpoint, and for one that Megatron or
    MindSpeed-LLM wrote.

    Raises:
        UsageError: The folder does not exist, none of its checkpoints is sound, or the checkpoint
            is of another model, lacks requested parts, or has optimizer states of another kind; the
            message names the flag that helps.
    """
    unsound: dict[str, str] = {}
    while True:
        found, has_checksums = agree_on_sound(directory, unsound, before)
        notes = [f"ignored {directory}/{line}" for line in found.ignored]
        if found.path is None and (source := load_foreign(directory, engine)):
            return LoadedState(0, {}, (f"{source}; {_WEIGHTS_ALONE}",))
        if found.path is None:
            notes.append(f"--load {directory} has no checkpoint: starting from --hf-checkpoint")
            return LoadedState(0, {}, tuple(notes))
        if not has_checksums:
            notes.append(f"{found.path} has no checksums: whether its bytes changed is not known")
        loaded, problems = _load_from(found.path, engine, options, companions)
        if not problems:
            damaged = tuple(found.path.with_name(name) for name in unsound)
            return replace(loaded, notes=(*notes, *loaded.notes), damaged=damaged)
        unsound[found.path.name] = problems


def _load_from(
    path: Path,
    engine: TrainEngine,
    options: CheckpointConfig,
    companions: Mapping[str, TrainEngine],
) -> tuple[LoadedState, str]:
    """Load a checkpoint whose files are sound; also return which values are not finite.

    Collective: the world. Raises what :func:`load_checkpoint` does.
    """
    record = resume.read_record(path)
    check_model(_architecture(engine), engine.role, record, path)
    if resume.CONVERTED in record.extra:
        options = replace(options, finetune=True)
    with_optimizer = not (options.finetune or options.no_load_optim)
    with_rng = not (options.finetune or options.no_load_rng)
    if with_optimizer:
        check_optimizer(_optimizer_kind(engine), record, path)
    if with_rng and not record.has_rng:
        raise UsageError(f"{path} has no random states (--no-save-rng); add --no-load-rng")
    layout, notes = _layout(engine), []
    if with_rng and record.layout != layout:
        with_rng = False
        notes.append(
            f"random states start from --seed: the checkpoint's layout {_words(record.layout)} "
            f"is not this run's {_words(layout)}"
        )
    problems = _load_tensors(path, engine, with_optimizer, with_rng)
    for role, companion in companions.items():
        said, wrong = _load_companion(path, role, companion, record, options)
        notes, problems = notes + said, problems + [f"{role}: {text}" for text in wrong]
    for role in sorted(set(record.companions) - set(companions)):
        notes.append(
            f"{path} holds a {role} that this run does not take: "
            + _UNUSED.get(role, "it is left out")
        )
    agreed = agreed_problems(problems)
    if options.finetune:
        notes.append(f"weights of {path}; {_WEIGHTS_ALONE}")
        return LoadedState(0, {}, tuple(notes)), agreed
    engine.schedule.num_updates = record.num_updates
    notes.append(f"resuming after step {record.step} from {path}")
    return LoadedState(record.step, with_tensors(path, record.extra), tuple(notes)), agreed


def _load_companion(
    path: Path, role: str, engine: TrainEngine, record: CheckpointRecord, options: CheckpointConfig
) -> tuple[list[str], list[str]]:
    """Load another model of the run. Collective: the world.

    Returns:
        Notes for the user, and values of this rank that are not finite.

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
        return [f"{path} has no {role}: it starts from its first weights"], []
    check_model(_architecture(engine), engine.role, kept, path)
    with_optimizer = trained and not (options.finetune or options.no_load_optim)
    if with_optimizer:
        check_optimizer(_optimizer_kind(engine), kept, path)
    problems = _load_tensors(path / role, engine, with_optimizer, with_rng=False)
    if trained and not options.finetune:
        engine.schedule.num_updates = kept.num_updates
    return [], problems


def _load_tensors(
    path: Path, engine: TrainEngine, with_optimizer: bool, with_rng: bool
) -> list[str]:
    """Load the weights and, if asked for, the optimizer and random states into the engine.

    Collective: the world.

    Returns:
        The tensors of this rank that are not finite.
    """
    if not swapped_optimizer.is_used():
        adamw_step.apply()
    reshardable_load.apply()
    engine.platform.synchronize()  # a late copy would overwrite what is loaded
    strategy = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(str(path)), _replicas()
    )
    own, _ = _sharded_state(engine, with_optimizer, with_rng, loading=True)
    wanted = regrouped(own, path, LocalNonpersistentObject) if engine.spec.moe else own
    names = {
        place: tensor_name(part.key, tuple(part.global_offset))
        for place, part in leaves(wanted)
        if isinstance(part, ShardedTensor)
    }
    with plain_objects_only(path):
        state = with_own_groups(dist_checkpointing.load(wanted, str(path), strategy))
    loaded = (
        (names.get(place) or ".".join(map(str, place)), value)
        for place, value in leaves(state)
        if isinstance(value, torch.Tensor)
    )
    problems = [f"{text} (rank {dist.get_rank()})" for text in problems_of(loaded)]
    for key, module in _modules(engine).items():
        module.load_state_dict(state[key])
    if with_optimizer:
        load_state(engine.optimizer, torch_optimizers(engine.optimizer), state[OPTIMIZER])
    else:
        engine.reload_master_weights()
    if with_rng:
        set_rng_state(engine.platform, state["rng"])
    return problems


def _sharded_state(
    engine: TrainEngine, with_optimizer: bool, with_rng: bool, *, loading: bool
) -> tuple[dict[str, Any], list[OptimizerShard]]:
    """Return this rank's tensors and their place in the model for megatron-core to save or fill.

    Where it saves, states of a distributed optimizer are apart, as shards that no other rank has.
    """
    weights = {key: module.sharded_state_dict() for key, module in _modules(engine).items()}
    state: dict[str, Any] = dict(weights)
    shards: list[OptimizerShard] = []
    if with_optimizer:
        sharded = engine.models[0].ddp_config.use_distributed_optimizer
        initialize_state(torch_optimizers(engine.optimizer), distributed=sharded)
        if loading:
            state[OPTIMIZER] = engine.optimizer.sharded_state_dict(
                weights, is_loading=True, metadata=FORMAT
            )
        else:
            state[OPTIMIZER], shards = sharded_state(engine.optimizer, weights, states_of)
        share_common_step(state[OPTIMIZER])
    if with_rng:
        place = ((dist.get_world_size(),), (dist.get_rank(),))
        state["rng"] = ShardedObject("rng", rng_state(engine.platform), *place)
    return state, shards


def _architecture(engine: TrainEngine) -> dict[str, Any]:
    """Return what a model is in types that JSON keeps: its spec and its adapters. Collective."""
    fields = asdict(engine.spec)
    if engine.adapters is not None:
        fields[ADAPTERS] = engine.adapters.identity(engine.named_parameters())
    return json.loads(json.dumps(fields))  # type: ignore[no-any-return]


def _layout(engine: TrainEngine) -> dict[str, int]:
    layout = engine.layout.parallel
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "dp": layout.dp}
    return sizes | {"vpp": layout.stages.vpp, "ep": layout.ep, "etp": layout.etp}


def _modules(engine: TrainEngine) -> dict[str, Any]:
    """Return the chunks of this rank, or their adapters, by megatron-core's keys."""
    kept = engine.modules if engine.adapters is None else engine.adapters.modules
    if len(kept) == 1:
        return {"model": kept[0]}
    return {f"model{i}": module for i, module in enumerate(kept)}


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


def estimated_bytes(engine: TrainEngine, with_optimizer: bool) -> int:
    """Return about how many bytes a checkpoint of a model takes."""
    shapes: list[tuple[int, ...]] = [*engine.layout.hf_shapes.values()]
    if engine.adapters is not None:
        shapes = [*adapter_shapes(engine.layout, engine.adapters.lora)]
    num_parameters = sum(math.prod(shape) for shape in shapes)
    weight_bytes = 2 if engine.modules[0].config.bf16 else 4
    return num_parameters * (weight_bytes + (_OPTIMIZER_BYTES if with_optimizer else 0))
