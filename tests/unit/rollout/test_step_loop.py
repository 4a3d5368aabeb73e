"""The step loop and the packed vector with one rank; four real ranks are in test_step_sync.py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.table_engine import single_rank

from mindspeed_rl.rollout.stats import StepStats
from mindspeed_rl.rollout.step_loop import run_steps
from mindspeed_rl.vllm_patches.step_sync import StepSync

LENGTHS = (5, 2, 4)
GROUP = SimpleNamespace(world_size=1, device="cpu", device_group=None)


class Engine:
    """Gives every request one token per step and reduces once per step, as the engines do.

    Attributes:
        dummies: steps without a request.
        read_prompts: of each step, what the vector said.
    """

    def __init__(self, lengths: tuple[int, ...], sync: StepSync | None) -> None:
        self._left = {str(i): [length, 0] for i, length in enumerate(lengths)}
        self._sync = sync
        self.dp_group = None
        self.should_execute_dummy_batch = False
        self.dummies = 0
        self.read_prompts: list[bool] = []

    def get_num_unfinished_requests(self) -> int:
        return len(self._left)

    def add(self, key: str, length: int) -> None:
        self._left[key] = [length, 0]

    def step(self) -> list[Any]:
        if self._sync is not None:
            first = any(done == 0 for _, done in self._left.values())
            tokens = 7 * len(self._left) if first else max(len(self._left), 1)
            counts = self._sync.reduce((tokens, 5), 0, GROUP)
            assert counts.tolist() == [[tokens], [5]] and counts.dtype == torch.int32
            self.read_prompts.append(self._sync.reads_prompts)
        if self.should_execute_dummy_batch:
            assert not self._left
            self.dummies += 1
            return []
        outputs = []
        for key, state in list(self._left.items()):
            state[1] += 1
            finished = state[1] == state[0]
            tokens = SimpleNamespace(token_ids=[1] * state[1])
            outputs.append(SimpleNamespace(request_id=key, finished=finished, outputs=[tokens]))
            if finished:
                del self._left[key]
        return outputs


def all_steps(
    engine: Engine,
    sync: StepSync | None,
    interval: int,
    stats: StepStats | None = None,
    max_steps: int | None = None,
) -> tuple[list[int], StepStats]:
    """Numbers of the requests as they finished."""
    stats = stats or StepStats()
    steps = run_steps(engine, sync, interval, stats, max_steps)
    return [int(o.request_id) for step in steps for o in step if o.finished], stats


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with single_rank():
        yield


@pytest.mark.parametrize("interval", [1, 3, 4])
def test_ranks_stop_together_when_nobody_has_requests(
    interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first look after a step that nobody needed: all ranks see it in the same step."""
    clock = SimpleNamespace(perf_counter=count().__next__)  # every look at it is a second later
    monkeypatch.setattr("mindspeed_rl.rollout.step_loop.time", clock)
    monkeypatch.setattr("mindspeed_rl.vllm_patches.step_sync.time", clock)
    sync = StepSync()
    engine = Engine(LENGTHS, sync)
    finished, stats = all_steps(engine, sync, interval)
    assert sorted(finished) == [0, 1, 2]
    needed = max(LENGTHS)
    expected = -(-(needed + 1) // interval) * interval
    assert stats.steps == expected and stats.reductions == expected
    assert stats.dummy_steps == engine.dummies == expected - needed
    assert engine.read_prompts == [True] + [False] * (expected - 1)
    assert stats.running == {3: 1, 2: 2, 1: 1}, "lengths 5, 2, 4 without their first tokens"
    assert stats.prompt_steps == 1
    assert (stats.seconds, stats.sync_seconds) == (3 * stats.steps, stats.reductions)


def test_the_engine_s_own_agreement_stays() -> None:
    engine = Engine(LENGTHS, None)
    finished, stats = all_steps(engine, None, 1)
    assert sorted(finished) == [0, 1, 2] and stats.steps == max(LENGTHS)
    assert stats.reductions == 0 and stats.sync_seconds == 0


def test_a_step_without_its_reduction_is_an_error() -> None:
    """An engine that forgot it would let its peers hang."""
    sync = StepSync()
    with pytest.raises(AssertionError, match="passed without its reduction"):
        all_steps(Engine(LENGTHS, None), sync, 1)


def test_batches_are_those_of_the_fullest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of an engine are padded to it, so graphs are chosen for it."""
    steps = iter([(40, 5, 1), (5, 5, 0), (33, 5, 1), (4, 4, 0), (1, 0, 0)])

    def add_the_other(vector: torch.Tensor, group: object) -> None:
        tokens, unfinished, reads = next(steps)
        vector[1] += tokens
        vector[-2] += unfinished
        vector[-1] += reads

    sync = StepSync()
    monkeypatch.setattr(dist, "all_reduce", add_the_other)
    group = SimpleNamespace(world_size=2, device="cpu", device_group=None)
    for mine in (21, 3, 3, 2, 1):
        sync.offer(0 if mine == 1 else min(mine, 3))
        sync.reduce((mine,), 0, group)
    assert sync.stats.running == {5: 1, 4: 1}, "prompts and the last look are no decode steps"
    assert sync.finished()


def test_drafts_are_no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are the dummy tokens of a rank without requests, which are as many as a draft's."""
    monkeypatch.setattr(dist, "all_reduce", lambda vector, group: None)
    sync = StepSync()
    group = SimpleNamespace(world_size=1, device="cpu", device_group=None)
    reads = []
    for rows, requests, drafted in ((23, 3, 20), (24, 3, 20), (9, 0, 0), (9, 1, 0)):
        sync.offer(requests, drafted=drafted)
        sync.reduce((rows,), 0, group)
        reads.append(sync.reads_prompts)
    assert reads == [False, True, False, True]


@pytest.mark.parametrize("packed", [False, True])
def test_a_loop_that_is_left_goes_on_where_it_was(packed: bool) -> None:
    """Settling points cut a rollout; what is stepped and finished is that of one call."""
    sync = StepSync() if packed else None
    engine, stats = Engine(LENGTHS, sync), StepStats()
    parts = [all_steps(engine, sync, 1, stats, max_steps=2)[0] for _ in range(3)]
    assert parts == [[1], [2], [0]]
    assert stats.steps == max(LENGTHS) + packed, "with ours one more, which sees that all is done"
    assert stats.running == {3: 1, 2: 2, 1: 1}


class Late:
    """A request that comes after a number of looks.

    Attributes:
        num_awaited: 1 until it has come.
    """

    num_awaited = 1

    def __init__(self, engine: Engine, looks: int) -> None:
        self._engine, self._looks = engine, looks

    def look(self) -> None:
        self._looks -= 1
        if self._looks == 0:
            self._engine.add("9", 3)
            self.num_awaited = 0


@pytest.mark.parametrize("looks", [2, 5, 8])
@pytest.mark.parametrize("packed", [False, True])
def test_a_request_that_is_awaited_keeps_the_ranks_together(packed: bool, looks: int) -> None:
    """It may come while others are generated, with their last token, and when all have ended."""
    sync = StepSync() if packed else None
    engine, stats = Engine(LENGTHS, sync), StepStats()
    late = Late(engine, looks)
    finished = []
    for outputs in run_steps(engine, sync, 1, stats, arrivals=late):  # type: ignore[arg-type]
        finished += [int(o.request_id) for o in outputs if o.finished]
        late.look()
    assert sorted(finished) == [0, 1, 2, 9]
    needed = max(max(LENGTHS), looks + 3)
    idle = max(0, looks - max(LENGTHS))
    assert stats.steps == (needed + 1 if packed else needed - idle)
    assert engine.dummies == (idle + 1 if packed else 0)
    assert sum(engine.read_prompts) == (2 if packed else 0)
