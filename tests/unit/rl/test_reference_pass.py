"""Log-probs of the reference in rows of one sequence, and those that came in the rollout."""

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

from mindspeed_rl.core.types import Completion, Prompt, Rollout
from mindspeed_rl.generation.rollout_worker import TailWork
from mindspeed_rl.rl.reference import TailReference
from mindspeed_rl.samples.columns import EARLY_REFERENCE
from mindspeed_rl.samples.packing import MicroBatch

SINGLE = "--grpo-kl-beta 0.1 --reference-pass single --global-batch-size 3 "


class Rows(TablePolicy):
    """A reference that differs from the policy; it notes the samples of its rows."""

    def __init__(self) -> None:
        super().__init__(first_table() - torch.arange(VOCAB) / 8)
        self.rows: list[tuple[int, ...]] = []

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor | None]:
        self.rows += [b.sample_ids for b in batches]
        return super().logprobs(batches)


def run_with(folder: Path, flags: str = SINGLE, tail: TailWork | None = None) -> TableRun:
    """A run whose reference notes its rows; with ``tail`` samples keep what it says of them."""
    run = make_run(folder, flags, REWARDS)
    run.set_models(reference=cast(Any, Rows()))
    if tail is not None:
        columns = (*run.parts.samples.columns, EARLY_REFERENCE)
        run.parts = replace(
            run.parts, tail=tail, samples=replace(run.parts.samples, columns=columns)
        )
        run.set_rollouts(columns=columns)
    return run


def expected(sample_id: int) -> list[float]:
    table = Rows().table.detach()
    return cast(list[float], table[list(response_of(sample_id))].tolist())


def test_every_sample_has_a_row_of_its_own(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    batches = run.batches()
    assert by_sample(batches, "ref_logprobs") == [expected(i) for i in range(6)]
    rows = cast(Rows, run.reference).rows
    assert sorted(rows) == [(i,) for i in range(6)]
    assert value(batches.metrics, "forward/reference") == 2
    packed = run_with(tmp_path, SINGLE.replace("single", "packed"))
    assert by_sample(packed.batches(), "ref_logprobs") == by_sample(batches, "ref_logprobs")
    assert max(map(len, cast(Rows, packed.reference).rows)) > 1


def test_cut_responses_that_are_not_trained_on_have_no_row(tmp_path: Path) -> None:
    run = run_with(tmp_path, SINGLE + "--rl-overlong-filtering")
    batches = run.batches()
    assert sorted(cast(Rows, run.reference).rows) == [(1,), (3,), (5,)]
    assert by_sample(batches, "ref_logprobs") == [expected(i) if i % 2 else [] for i in range(6)]


def test_what_came_during_the_rollout_is_not_computed_again(tmp_path: Path) -> None:
    """Samples 1 and 4 came with numbers that no pass would give."""
    early = {i: [-20.0 * i - n for n in range(COUNTS[i])] for i in (1, 4)}

    def tail(rollouts: Sequence[Rollout]) -> Mapping[int, bytes]:
        assert [r.sample_id for r in rollouts] == list(range(6))
        return {i: struct.pack(f"{len(v)}f", *v) for i, v in early.items()}

    run = run_with(tmp_path, tail=tail)
    rollouts = run.generate()
    assert [s.has_reference for s in rollouts.samples] == [False, True, False, False, True, False]
    batches = run.prepared(rollouts.samples)
    assert by_sample(batches, "ref_logprobs") == [early.get(i, expected(i)) for i in range(6)]
    assert sorted(cast(Rows, run.reference).rows) == [(0,), (2,), (3,), (5,)]
    assert value(batches.metrics, "throughput/reference_in_tail") == pytest.approx(2 / 6)


class Others:
    """A collective that the other ranks of the world join after so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks, self.waited = looks, False

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.waited = True


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
    tail = TailReference(
        cast(Any, run.reference), rules, dist.group.WORLD, leads_engine=True, drop_truncated=True
    )
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: others)
    prompt = Prompt(0, (2, 2, 2), "", "")
    rollouts = [
        Rollout(i, prompt, Completion(ids, (0.0,) * len(ids), "stop" if i % 2 else "length", 0))
        for i, ids in reversed([(i, response_of(i)) for i in range(10)])
    ]
    found = tail(rollouts)
    assert others.waited and sorted(found) == done
    for sample_id, values in found.items():
        assert list(struct.unpack(f"{len(values) // 4}f", values)) == expected(sample_id)
    assert replace(tail, leads_engine=False)(rollouts) == {}, "another rank has them"
