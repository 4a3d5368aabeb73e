"""Who is on the device in which phase, by offload mode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.draft_models import LENGTH, speculation, write_draft_model
from support.planned_run import RECOMPUTE, WORLD, expert_config

from mindspeed_rl.config.dry_run import MACHINES
from mindspeed_rl.core.memory import FIXED_MODES, MemoryOwner, MemoryPhase, OffloadMode
from mindspeed_rl.planning.budget import resolve_offload
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.suggestions import plan_of
from mindspeed_rl.rollout.draft_model import draft_model_of

RANK = 17


def prediction_of(
    *flags: str, offload: OffloadMode = OffloadMode.NONE, machine: str = "cpu"
) -> MemoryPrediction:
    """With full recomputation, or other ``flags`` instead."""
    config = expert_config(*(flags or RECOMPUTE))
    return MemoryPrediction(config, plan_of(config, WORLD), MACHINES[machine], offload)


def test_phases_hold_what_the_offload_mode_says() -> None:
    tables = {mode: prediction_of(offload=mode).rank_table(RANK) for mode in FIXED_MODES}
    weights = {MemoryOwner.PARAMETERS, MemoryOwner.REFERENCE}
    trainer = weights | {MemoryOwner.GRAD_BUFFERS, MemoryOwner.OPTIMIZER}
    rollout = {mode: trainer & set(t[MemoryPhase.ROLLOUT]) for mode, t in tables.items()}
    assert rollout[OffloadMode.NONE] == trainer
    assert rollout[OffloadMode.OPTIMIZER] == weights
    assert rollout[OffloadMode.ALL] == set()
    for mode, table in tables.items():
        assert MemoryOwner.PARAMETERS in table[MemoryPhase.SYNC], "weights are about to be read"
        assert MemoryOwner.KV_CACHE not in table[MemoryPhase.SYNC], "the cache comes last"
        keeps = MemoryOwner.ENGINE_WEIGHTS in table[MemoryPhase.TRAIN_IDLE]
        assert keeps == (mode is not OffloadMode.ALL)
    # with everything away, the reference comes in for its own pass only
    all_away = tables[OffloadMode.ALL]
    assert MemoryOwner.REFERENCE not in all_away[MemoryPhase.TRAIN_IDLE]


def test_borders_are_what_the_ledger_reads() -> None:
    prediction = prediction_of(offload=OffloadMode.OPTIMIZER)
    borders = {s: prediction.border(RANK, s) for s in ("train", "idle", "sync", "rollout")}
    weights = {"parameters", "reference", "engine_weights"}
    assert set(borders["train"]) == weights | {"grad_buffers", "optimizer"}
    assert set(borders["idle"]) == set(borders["sync"]) == weights
    assert set(borders["rollout"]) == weights | {"kv_cache"}
    away = prediction_of(offload=OffloadMode.ALL)
    assert set(away.border(RANK, "idle")) == {"parameters"}
    assert set(away.border(RANK, "rollout")) == {"engine_weights", "kv_cache"}


def test_a_model_that_drafts_stays_on_a_host_and_leaves_a_device(tmp_path: Path) -> None:
    """It is in the engine's pool on a device; its part of the cache is a part of every token."""
    changes = {"vocab_size": prediction_of().plan.spec.vocab_size}
    drafts = speculation("draft_model", write_draft_model(tmp_path, changes))
    plain = prediction_of(offload=OffloadMode.ALL)
    flags = (*RECOMPUTE, *drafts)
    found = prediction_of(*flags, offload=OffloadMode.ALL)
    draft, tp = draft_model_of(found.config.engine_options), found.plan.engine.tp
    assert draft is not None
    item, tokens = found.engine.item, found.engine.sizes.batched_tokens
    size = (draft.elements(tp) + 2 * tokens * 48) * item
    for phase, table in found.rank_table(RANK).items():
        assert table.pop(MemoryOwner.DRAFT_MODEL) == size, phase
        table.pop(MemoryOwner.ENGINE_WORKSPACE, None)  # has the logits of drafts
        wanted = plain.rank_table(RANK)[phase]
        assert {o: b for o, b in wanted.items() if o in table and o != MemoryOwner.KV_CACHE} == {
            o: b for o, b in table.items() if o != MemoryOwner.KV_CACHE
        }
    more = found.engine.token_bytes() - plain.engine.token_bytes()
    assert more == draft.cached_values(tp) * item
    assert found.engine.rows == 1 + LENGTH
    device = prediction_of(*flags, offload=OffloadMode.ALL, machine="h200").rank_table(RANK)
    other = prediction_of(offload=OffloadMode.ALL, machine="h200").rank_table(RANK)
    owner = MemoryOwner.ENGINE_WEIGHTS
    assert device[MemoryPhase.ROLLOUT][owner] == other[MemoryPhase.ROLLOUT][owner] + size
    assert all(MemoryOwner.DRAFT_MODEL not in table for table in device.values())


def test_auto_takes_the_least_offload_that_fits() -> None:
    prediction = prediction_of()
    ranks = prediction.representatives()
    needed = {m: replace(prediction, offload=m).peak(ranks).num_bytes for m in FIXED_MODES}
    assert list(needed.values()) == sorted(needed.values(), reverse=True)
    for mode, num_bytes in needed.items():
        assert resolve_offload(prediction, ranks, num_bytes)[0] is mode
    mode, why = resolve_offload(prediction, ranks, needed[OffloadMode.ALL] - 1)
    assert mode is OffloadMode.ALL and "exceeds" in why


def test_the_reference_pass_is_the_peak_where_it_brings_more_than_training_works_with() -> None:
    """With everything away in rollouts the reference is on the device for its own pass only."""

    def train(*flags: str) -> dict[MemoryOwner, int]:
        away = prediction_of(*flags, offload=OffloadMode.ALL)
        return away.rank_table(RANK)[MemoryPhase.TRAIN]

    short, long = train(), train("--micro-batch-size", "8")
    assert short[MemoryOwner.REFERENCE] > 0 and MemoryOwner.LOGITS not in short
    assert MemoryOwner.REFERENCE not in long
    assert long[MemoryOwner.ACTIVATIONS] > short[MemoryOwner.REFERENCE]
    without = train(*RECOMPUTE, "--grpo-kl-beta", "0")
    assert sum(without.values()) < sum(short.values())


def test_swapped_optimizer_state_passes_through_in_parts() -> None:
    plain = prediction_of().rank_table(RANK)[MemoryPhase.TRAIN_IDLE]
    swapped = prediction_of(*RECOMPUTE, "--swap-optimizer", machine="a3").rank_table(RANK)
    part = swapped[MemoryPhase.TRAIN_IDLE][MemoryOwner.OPTIMIZER]
    assert part == -(-plain[MemoryOwner.OPTIMIZER] // 16)


@pytest.mark.slow
def test_ranks_of_a_stage_differ_by_padding_alone() -> None:
    prediction = prediction_of()
    first, last = prediction.representatives()
    assert (first, last) == (0, 16)
    for rank in range(16, 32):
        for phase, table in prediction.rank_table(rank).items():
            expected = sum(prediction.rank_table(last)[phase].values())
            assert sum(table.values()) == pytest.approx(expected, rel=1e-3), (rank, phase)


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("", 0),
        ("--rollout-graph-mode full-decode --rollout-graph-sizes 8 64", 2),
        ("--rollout-graph-mode full-decode --rollout-graph-sizes auto --rollout-graph-count 5", 5),
    ],
)
def test_graphs_are_those_of_the_flags(flags: str, count: int) -> None:
    table = prediction_of(*RECOMPUTE, *flags.split(), machine="h200").rank_table(RANK)
    assert table[MemoryPhase.ROLLOUT].get(MemoryOwner.GRAPHS, 0) == count * (128 << 20)


def test_a_save_takes_what_it_copies() -> None:
    """Of the host; the device has the models that are written, and needs nothing else."""

    def prediction(*flags: str, machine: str = "h200") -> MemoryPrediction:
        return prediction_of(*RECOMPUTE, *flags, machine=machine, offload=OffloadMode.ALL)

    assert MemoryPhase.SAVE not in prediction().rank_table(RANK)
    saved = prediction("--save", "DIR")
    updated = prediction("--save", "DIR", "--ref-update-interval", "5")
    of_save, idle = (saved.rank_table(RANK)[p] for p in (MemoryPhase.SAVE, MemoryPhase.TRAIN_IDLE))
    assert of_save == idle and MemoryOwner.GRAD_BUFFERS in of_save
    assert updated.rank_table(RANK)[MemoryPhase.SAVE].keys() - of_save.keys() == {
        MemoryOwner.REFERENCE
    }
    whole = prediction("--save", "DIR", "--async-save").save_host_bytes(RANK)
    weights = prediction("--save", "DIR", "--async-save", "--no-save-optim").save_host_bytes(RANK)
    assert weights < whole == pytest.approx(7 * weights, rel=1e-3)
    assert 0 < saved.save_host_bytes(RANK) < whole
    on_host = prediction("--save", "DIR", "--async-save", machine="cpu")
    table = on_host.rank_table(RANK)[MemoryPhase.SAVE]
    assert table[MemoryOwner.SAVE_STAGING] == on_host.save_host_bytes(RANK) == whole
