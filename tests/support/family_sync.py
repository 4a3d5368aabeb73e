"""Three weight updates of an engine whose weights are not plain: experts and latent attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.rollout_worlds import TEMPERATURE, Both, SyncFacts, build_both, sync_and_compare
from support.training_worlds import make_job

from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.weight_layouts.base import Piece, pieces_of


@dataclass(frozen=True, slots=True)
class FamilySync:
    """One update on one rank.

    Attributes:
        facts: log-probs against trainer and transformers.
        differing: engine parameters whose bits are not those of a fresh load.
        num_params: engine parameters of the rank.
        unreadable: the error of asking for live parameters outside an update.
        engine_bytes: weights and cache that the engine holds.
        predicted_bytes: the same.
    """

    facts: SyncFacts
    differing: list[str]
    num_params: int
    unreadable: str
    engine_bytes: tuple[int, int]
    predicted_bytes: tuple[int, int]


def family_sync_world(
    world: World, model: str, flags: Sequence[str], work_dir: str
) -> list[FamilySync]:
    """Rank function: build trainer and engine, update three times."""
    from mindspeed_rl.building.engine import with_installed_engine
    from mindspeed_rl.building.models import build_engine, initialize_parallel

    common = ["--micro-batch-size", "8", "--rl-default-temperature", str(TEMPERATURE)]
    common += ["--rollout-kv-cache-gb", "0.0625", "--vllm-max-num-seqs", "32"]
    job = with_installed_engine(make_job(world, model, [*common, *flags]))
    initialize_parallel(job)
    both = build_both(job, build_engine(job, "policy", 1, TEMPERATURE))
    both.to_rollout(0)
    return [one_sync(both, version, work_dir) for version in (11, 12, 13)]


def plain_weights(engine: Any) -> dict[str, torch.Tensor]:
    """The parameters of an awake engine in plain order, outside of an update.

    The portable vector kernel ("vec") keeps ``[rows / 16, columns, 16]`` of each matrix of an
    expert in the shape of the matrix.
    """
    assert all(kernel == "vec" for _, kernel in engine._derived._packed), "a kernel's own order"

    def plain(name: str, param: torch.Tensor) -> torch.Tensor:
        if not engine._derived.packs_experts or not name.endswith(("w13_weight", "w2_weight")):
            return param
        experts, rows, columns = param.shape
        blocks = param.view(experts, rows // 16, columns, 16)
        return blocks.transpose(2, 3).reshape(param.shape)

    return {name: plain(name, param) for name, param in engine._params().items()}


def one_sync(both: Both, version: int, work_dir: str) -> FamilySync:
    """Update, compare log-probs, compare bits with a fresh load. Collective: the world.

    Padding rows of the vocabulary belong to no tensor and are left out.
    """
    from mindspeed_rl.checkpoint.hf import load_hf

    facts = sync_and_compare(both, version, work_dir)
    layout, rank = both.job.plan.rollout_layout, both.job.world.rank
    fresh = {name: torch.zeros(shape) for name, shape in layout.local_shapes(rank).items()}
    load_hf(Path(work_dir) / f"export-{version}", layout, rank, fresh)
    found = plain_weights(both.engine)
    assert found.keys() == fresh.keys()
    differing = [
        f"{piece.param} ({piece.hf_name})"
        for piece in (shard.piece for shard in pieces_of(layout, rank))
        if not torch.equal(_shown(found, piece), _shown(fresh, piece))
    ]
    try:
        both.engine.weight_views()
        unreadable = ""
    except RuntimeError as error:
        unreadable = str(error)
    predicted = MemoryPrediction(both.job.config, both.job.plan).engine
    return FamilySync(
        facts,
        differing,
        len(fresh),
        unreadable,
        (both.engine.weight_bytes, both.engine.cache_bytes),
        (predicted.weights(rank), predicted.kv_cache()),
    )


def _shown(params: Mapping[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    shown: torch.Tensor = piece.view.of(params[piece.param])[piece.param_box.slices]
    return shown.float()
