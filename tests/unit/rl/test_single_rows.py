"""Log-probs of policy and reference in rows of one sequence, and those of the rollout."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.rl_run import COUNTS, REWARDS, TablePolicy, TableRun, by_sample, make_run, value
from support.table_engine import VOCAB, first_table, response_of

from mindspeed_rl.core.types import Completion, EarlyLogprobs, Prompt, Rollout
from mindspeed_rl.generation.rollout_worker import TailWork
from mindspeed_rl.rl.single_rows import TailPasses
from mindspeed_rl.samples.columns import EARLY_COLUMNS, EARLY_OLD, EARLY_REFERENCE
from mindspeed_rl.samples.packing import MicroBatch

SINGLE = "--grpo-kl-beta 0.1 --reference-pass single --global-batch-size 3 "
BOTH = SINGLE + "--old-logprob recompute --old-logprob-pass single "


class Rows(TablePolicy):
    """A model that notes the samples of its rows; a reference differs from the policy."""

    def __init__(self, slope: float = 1 / 8) -> None:
        super().__init__(first_table() - torch.arange(VOCAB) * slope)
        self.rows: list[tuple[int, ...]] = []

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor | None]:
        self.rows += [b.sample_ids for b in batches]
        return super().logprobs(batches)


def run_with(folder: Path, flags: str = SINGLE, tail: TailWork | None = None) -> TableRun:
    """A run whose models note their rows; with ``tail`` samples keep what it says of them."""
    run = make_run(folder, flags, REWARDS)
    run.set_models(policy=cast(Any, Rows(0.0)), reference=cast(Any, Rows()))
    if tail is not None:
        columns = (*run.parts.samples.columns, EARLY_OLD, EARLY_REFERENCE)
        run.parts = replace(
            run.parts, tail=tail, samples=replace(run.parts.samples, columns=columns)
        )
        run.set_rollouts(columns=columns)
    return run


def expected(sample_id: int, slope: float = 1 / 8) -> list[float]:
    table = Rows(slope).table.detach()
    return cast(list[float], table[list(response_of(sample_id))].tolist())


def rows_of(model: object) -> list[tuple[int, ...]]:
    return sorted(cast(Rows, model).rows)


def test_every_sample_has_a_row_of_its_own(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    batches = run.batches()
    assert by_sample(batches, "ref_logprobs") == [expected(i) for i in range(6)]
    assert rows_of(run.reference) == [(i,) for i in range(6)]
    assert value(batches.metrics, "forward/reference") == 2
    assert not [name for name in batches.metrics if name.endswith("in_tail")]
    packed = run_with(tmp_path, SINGLE.replace("single", "packed"))
    assert by_sample(packed.batches(), "ref_logprobs") == by_sample(batches, "ref_logprobs")
    assert max(map(len, cast(Rows, packed.reference).rows)) > 1


def test_cut_responses_that_are_not_trained_on_have_no_row(tmp_path: Path) -> None:
    run = run_with(tmp_path, SINGLE + "--rl-overlong-filtering")
    batches = run.batches()
    assert rows_of(run.reference) == [(1,), (3,), (5,)]
    assert by_sample(batches, "ref_logprobs") == [expected(i) if i % 2 else [] for i in range(6)]


def test_old_log_probs_have_rows_of_their_own_where_they_are_asked_for(tmp_path: Path) -> None:
    run = run_with(tmp_path, BOTH.replace("--reference-pass single ", ""))
    batches = run.batches()
    assert by_sample(batches, "old_logprobs") == [expected(i, 0.0) for i in range(6)]
    assert rows_of(run.policy) == [(i,) for i in range(6)]
    assert max(map(len, rows_of(run.reference))) > 1
    assert value(batches.metrics, "forward/old") == 2
    packed = run_with(tmp_path, BOTH.replace("single", "packed"))
    assert by_sample(packed.batches(), "old_logprobs") == by_sample(batches, "old_logprobs")
    assert max(map(len, rows_of(packed.policy))) > 1


def said(of_sample: Mapping[int, Sequence[float]], sample_id: int) -> bytes:
    values = of_sample.get(sample_id, ())
    return struct.pack(f"{len(values)}f", *values)


@pytest.mark.parametrize("passes", [("old",), ("reference",), ("old", "reference")])
def test_what_came_during_the_rollout_is_not_computed_again(
    passes: tuple[str, ...], tmp_path: Path
) -> None:
    """Samples 1 and 4 came with numbers that no pass would give, others for each model."""
    old = {i: [-20.0 * i - n for n in range(COUNTS[i])] for i in (1, 4)}
    reference = {i: [-30.5 * i - n for n in range(COUNTS[i])] for i in (1, 4)}
    early = {name: {"old": old, "reference": reference}[name] for name in passes}

    def tail(rollouts: Sequence[Rollout]) -> Mapping[int, EarlyLogprobs]:
        assert [r.sample_id for r in rollouts] == list(range(6))
        return {
            i: EarlyLogprobs(**{name: said(values, i) for name, values in early.items()})
            for i in (1, 4)
        }

    run = run_with(tmp_path, BOTH, tail)
    missing = [EARLY_COLUMNS[name] for name in EARLY_COLUMNS.keys() - early.keys()]
    columns = tuple(c for c in run.parts.samples.columns if c not in missing)
    run.parts = replace(run.parts, samples=replace(run.parts.samples, columns=columns))
    run.set_rollouts(columns=columns)
    rollouts = run.generate()
    assert [s.has_early for s in rollouts.samples] == [False, True, False, False, True, False]
    batches = run.prepared(rollouts.samples)
    everything, later = [(i,) for i in range(6)], [(0,), (2,), (3,), (5,)]
    for name, column, slope, model, metric in (
        ("old", "old_logprobs", 0.0, run.policy, "old_logprobs_in_tail"),
        ("reference", "ref_logprobs", 1 / 8, run.reference, "reference_in_tail"),
    ):
        came = early.get(name, {})
        assert by_sample(batches, column) == [came.get(i, expected(i, slope)) for i in range(6)]
        assert rows_of(model) == (later if came else everything), name
        if came:
            assert value(batches.metrics, f"throughput/{metric}") == pytest.approx(2 / 6)
        else:
            assert f"throughput/{metric}" not in batches.metrics


class Others:
    """A collective that the other ranks of the world join after so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks, self.waited = looks, False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.waited = True


def passes_of(run: TableRun, **fields: Any) -> TailPasses:
    """The passes of both models of a run, which has all ranks."""
    found = TailPasses(
        {"old": cast(Any, run.policy), "reference": cast(Any, run.reference)},
        run.parts.samples.rules,
        cast(Any, dist.group.WORLD),
        leads_engine=True,
        drop_truncated=False,
    )
    return replace(found, **fields)


def test_a_step_with_half_of_its_log_probs_from_the_rollout_is_the_step_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of six samples are computed in the tail; gradients and weights have the same bits."""

    def work(rollouts: Sequence[Rollout]) -> Mapping[int, EarlyLogprobs]:
        with monkeypatch.context() as patched:
            patched.setattr(dist, "all_reduce", lambda *_, **__: Others(3))
            return passes_of(run)(rollouts)

    run, plain = run_with(tmp_path, BOTH, work), run_with(tmp_path, BOTH)
    rollouts = run.generate()
    assert [s.has_early for s in rollouts.samples] == [True] * 3 + [False] * 3
    metrics, expected_metrics = run.train_on(rollouts), plain.train_on(plain.generate())
    assert value(metrics, "loss/kl") == value(expected_metrics, "loss/kl") > 0
    for mine, theirs in zip(run.policy.gradients, plain.policy.gradients, strict=True):
        assert torch.equal(mine, theirs) and mine.abs().sum() > 0
    assert torch.equal(run.policy.table, plain.policy.table)


@pytest.mark.parametrize(
    ("looks", "done"), [(0, []), (1, [1, 3]), (2, [1, 3, 5, 7]), (9, [1, 3, 5, 7, 9])]
)
def test_the_tail_ends_between_two_bundles_when_all_engines_are_done(
    looks: int, done: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pipeline stages want bundles of two rows; every other response was cut."""
    run = run_with(tmp_path, SINGLE + "--rl-overlong-filtering")
    store, others = run.parts.samples, Others(looks)
    rules = replace(store.rules, packing=replace(store.rules.packing, fewest=2))
    tail = passes_of(run, rules=rules, drop_truncated=True)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: others)
    prompt = Prompt(0, (2, 2, 2), "", "")
    rollouts = [
        Rollout(i, prompt, Completion(ids, (0.0,) * len(ids), "stop" if i % 2 else "length", 0))
        for i, ids in reversed([(i, response_of(i)) for i in range(10)])
    ]
    found = tail(rollouts)
    assert others.waited and sorted(found) == done
    for i, early in found.items():
        assert early.old == said({i: expected(i, 0.0)}, i)
        assert early.reference == said({i: expected(i)}, i) != early.old
    assert replace(tail, leads_engine=False)(rollouts) == {}, "another rank has them"
