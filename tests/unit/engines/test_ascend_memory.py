"""The pool of vLLM-Ascend's sleep mode: what is kept, and errors in the middle."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from support.fake_ascend import GARBAGE, FakePool
from support.line_faults import Planted, fault_before_line

from mindspeed_rl.platforms import pool_memory as memory
from mindspeed_rl.platforms.base import DeviceMemory
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.platforms.pool_memory import PoolMemory
from mindspeed_rl.platforms.storages import outside, span_of


def test_what_is_outside_of_some_spans() -> None:
    whole = range(100, 150)
    assert outside(whole, []) == [whole]
    assert outside(whole, [range(90, 160)]) == []
    assert outside(whole, [range(140, 170), range(110), range(105, 115)]) == [range(115, 140)]
    assert outside(whole, [range(110, 115), range(112, 113), range(120, 125)]) == [
        range(100, 110), range(115, 120), range(125, 150),
    ]  # fmt: skip
    assert outside(whole, [range(100), range(150, 159)]) == [whole]


def test_the_span_of_a_tensor_has_no_gaps() -> None:
    whole = torch.zeros(4, 6)
    start = whole.data_ptr()
    assert span_of(whole) == span_of(whole.t()) == range(start, start + 96)
    assert span_of(whole[1:3]) == range(start + 24, start + 72)
    assert span_of(whole[:, 1:3]) is None, "its gaps are other tensors"
    assert span_of(whole[:0]) is None


class Sleeper:
    """A pool with two allocations of weights, one with plain tensors around a parameter."""

    def __init__(self, save: bool = True) -> None:
        self.pool = FakePool()
        self.mixed = self.pool.place(torch.arange(24.0), "weights")
        self.param = self.mixed[4:20].view(4, 4).t()
        self.stray = self.pool.place(torch.full((7,), 3.0), "weights")
        self.cache = self.pool.place(torch.ones(5), "kv_cache")
        self.in_use: list[bool] = []
        self.woken = 0
        self.memory = PoolMemory(
            self.pool, "weights", self._wake, CpuPlatform(), save=save, lost=lambda: [self.param],
            pool_in_use=self.in_use.append,
        )  # fmt: skip

    def _wake(self, tags: list[str]) -> None:
        self.pool.wake_up(tags)  # fails where it would map twice
        assert self.mapped == {True}, "what it turns is there"
        self.woken += 1

    @property
    def mapped(self) -> set[bool]:
        return {d.mapped for d in self.pool.pointer_to_data.values() if d.tag != "kv_cache"}

    def check(self) -> None:
        """Everything is there, and only the parameter was cleared."""
        assert self.mapped == {True}
        assert {d.tag for d in self.pool.pointer_to_data.values()} == {"weights", "kv_cache"}
        rest = torch.cat([self.mixed[:4], self.mixed[20:]])
        assert torch.equal(rest, torch.cat([torch.arange(4.0), torch.arange(20.0, 24.0)]))
        assert torch.equal(self.stray, torch.full((7,), 3.0))
        assert torch.equal(self.cache, torch.ones(5))


def test_only_what_no_update_writes_is_copied() -> None:
    sleeper = Sleeper()
    for cycle in (1, 2):
        sleeper.param.fill_(9.0)
        sleeper.memory.free()
        sleeper.memory.free()
        assert sleeper.mapped == {False} and int(sleeper.stray.view(torch.uint8)[0]) == GARBAGE
        sleeper.memory.bring_back()
        sleeper.memory.bring_back()
        sleeper.check()
        assert torch.count_nonzero(sleeper.param) == 0
        assert sleeper.woken == cycle and sleeper.in_use == [False, True] * cycle
    kept = 4 * (4 + 4 + 7)
    assert sleeper.pool.copied_bytes == {1: 2 * kept, 2: 2 * kept}
    assert sleeper.memory.num_bytes == 4 * (24 + 7)


def test_memory_of_no_tensor_is_not_copied() -> None:
    """The start of one allocation is free, and the end of the other one."""
    sleeper = Sleeper()
    first, second = sleeper.mixed.data_ptr(), sleeper.stray.data_ptr()
    free = [range(first, first + 8), range(second + 20, second + 28), range(8)]
    memory = PoolMemory(
        sleeper.pool, "weights", sleeper.pool.wake_up, CpuPlatform(), save=True,
        lost=lambda: [sleeper.param], unused=lambda: free,
    )  # fmt: skip
    memory.free()
    memory.bring_back()
    kept = 4 * (4 + 4 + 7) - 16
    assert sleeper.pool.copied_bytes == {1: kept, 2: kept}
    assert memory.saved_bytes == kept
    assert torch.equal(sleeper.mixed[2:4], torch.tensor([2.0, 3.0]))
    assert torch.equal(sleeper.stray[:5], torch.full((5,), 3.0))


class FullPlatform(CpuPlatform):
    """A device with little free memory, of which cached blocks are released on request."""

    free, cached = 100, 0

    def memory(self) -> DeviceMemory:
        return DeviceMemory(1000 - self.free, self.free, 1000)

    def release_cached_memory(self) -> None:
        self.free, self.cached = self.free + self.cached, 0


@pytest.mark.parametrize(("cached", "fits"), [(23, False), (24, True)])
def test_memory_that_is_not_there_is_told_before_the_pool_maps_any(cached: int, fits: bool) -> None:
    """Its ``create_and_map`` ends the process; the weights have 124 bytes."""
    sleeper = Sleeper()
    platform = FullPlatform()
    weights = PoolMemory(
        sleeper.pool, "weights", sleeper.pool.wake_up, platform, save=False, lost=list
    )
    weights.free()
    platform.free, platform.cached = 100, cached
    if fits:
        weights.bring_back()
        assert sleeper.mapped == {True}
    else:
        with pytest.raises(RuntimeError, match="the engine's weights need"):
            weights.bring_back()
        assert sleeper.mapped == {False}


def test_an_error_before_any_line_changes_nothing() -> None:
    """Towards sleep all of it is here afterwards, towards waking all of it is away."""
    planted = 0
    for number in range(1, 400):
        sleeper = Sleeper()
        with fault_before_line(number, [memory], not_in=["__init__"]) as lines, suppress(Planted):
            sleeper.memory.free()
            was_away = True
            sleeper.memory.bring_back()
            was_away = False
        if len(lines) < number:
            break
        planted += 1
        waking = "bring_back" in " ".join(lines)
        assert sleeper.mapped == {not waking}, (lines[-1], was_away)
        sleeper.memory.bring_back()
        sleeper.check()
        sleeper.memory.free()
        assert sleeper.mapped == {False}
        sleeper.memory.bring_back()
        sleeper.check()
    assert 60 < planted < 399


@pytest.mark.parametrize("way", ["host", "device"])
def test_a_copy_that_fails_changes_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = Sleeper()
    if way == "device":
        sleeper.memory.free()
    told = rf"a copy of \d+ bytes to the {way} failed with status 107001"
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=told):
        patch.setattr(sleeper.pool, "memcpy", lambda *args: 107001)
        (sleeper.memory.free if way == "host" else sleeper.memory.bring_back)()
    assert sleeper.mapped == {way == "host"}
    sleeper.memory.bring_back()
    sleeper.check()


def test_what_could_not_be_taken_back_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unmapping fails, and so does mapping again: the next call knows what is left."""
    sleeper = Sleeper()
    unmap = sleeper.pool.unmap_and_release
    second = list(sleeper.pool.pointer_to_data)[1]

    def refuses_second(handle: tuple[int, int, int, int]) -> None:
        if handle[2] == second:
            raise RuntimeError("cannot unmap")
        unmap(handle)

    def refuses(handle: object) -> None:
        raise RuntimeError("cannot map")

    with monkeypatch.context() as patch:
        patch.setattr(sleeper.pool, "unmap_and_release", refuses_second)
        patch.setattr(sleeper.pool, "create_and_map", refuses)
        with pytest.raises(RuntimeError, match="cannot map"):
            sleeper.memory.free()
    assert sleeper.mapped == {True, False}
    sleeper.memory.bring_back()
    sleeper.check()


def test_an_empty_tag_is_an_error() -> None:
    pool = FakePool()
    with pytest.raises(RuntimeError, match="sleep mode is not"):
        PoolMemory(pool, "weights", print, CpuPlatform(), save=True, lost=list)
