"""Memory that leaves and comes back: by storage, with its content, all of it or nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.queued_copies import GARBAGE, QueuedCopies

from mindspeed_rl.colocation.host_pool import HostPool
from mindspeed_rl.colocation.storage_group import StorageGroup
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.platforms.storages import num_bytes, storages_of

PLATFORM = CpuPlatform()


class NoHostMemory(CpuPlatform):
    """A platform on which nothing can be copied away."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        raise AssertionError("dropped memory needs no room on the host")


@pytest.mark.parametrize("packs", [False, True])
def test_late_copies_read_and_write_memory_that_is_there(packs: bool) -> None:
    """What is copied away is given back when the copy is done; what comes is waited for."""
    platform = QueuedCopies()
    tensors = [torch.arange(6.0), torch.arange(5.0) + 7]
    group = StorageGroup("group", lambda: tensors, platform, HostPool(platform), packs=packs)
    for _ in range(2):
        group.release()
        assert group.num_bytes() == 0
        group.restore()
        assert (tensors[0].view(torch.uint8) == GARBAGE).all(), "not there yet"
        platform.wait_for_copies()
        assert tensors[0].tolist() == list(range(6)) and tensors[1].tolist() == list(range(7, 12))


def test_gradients_are_dropped_without_a_copy() -> None:
    gradient = torch.ones(10)
    group = StorageGroup("grad_buffers", lambda: [gradient], NoHostMemory(), None)
    group.release()
    assert group.num_bytes() == 0
    group.restore()
    assert group.num_bytes() == 40 and gradient.zero_().sum() == 0


def test_state_that_appears_later_leaves_as_well() -> None:
    """AdamW makes its moments at its first step."""
    tensors = [torch.ones(4)]
    group = StorageGroup("optimizer", lambda: tensors, PLATFORM, HostPool(PLATFORM))
    group.release()
    group.restore()
    tensors.append(torch.full((8,), 2.0))
    group.release()
    assert num_bytes(storages_of(tensors)) == 0
    group.restore()
    assert torch.equal(tensors[1], torch.full((8,), 2.0))


def test_host_memory_is_taken_once() -> None:
    """The same region at every switch; a group that grew gets a larger one."""
    pool = HostPool(PLATFORM)
    first = pool.region("optimizer", 100)
    assert pool.region("optimizer", 80).data_ptr() == first.data_ptr()
    assert pool.region("parameters", 10).data_ptr() != first.data_ptr()
    grown = pool.region("optimizer", 120)
    assert pool.region("optimizer", 100).data_ptr() == grown.data_ptr()


def test_memory_in_use_is_not_released() -> None:
    tensor = torch.ones(4)

    def in_use() -> None:
        raise RuntimeError("gradients are accumulated")

    group = StorageGroup("gradients", lambda: [tensor], PLATFORM, None, before_release=in_use)
    with pytest.raises(RuntimeError, match="accumulated"):
        group.release()
    assert group.is_onloaded and torch.equal(tensor, torch.ones(4))


@pytest.mark.parametrize("packs", [False, True])
def test_a_failing_copy_changes_nothing(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    platform, tensors = CpuPlatform(), [torch.arange(5.0), torch.ones(2)]
    group = StorageGroup("parameters", lambda: tensors, platform, HostPool(platform), packs=packs)

    def full() -> None:
        raise torch.OutOfMemoryError("no memory")

    for call in (group.release, group.restore):
        before = group.is_onloaded
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(platform, "copies", full)
            call()
        assert group.is_onloaded is before and (group.num_bytes() > 0) is before
        call()
    assert torch.equal(tensors[0], torch.arange(5.0))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float64]),
            st.integers(0, 40),
        ),
        min_size=2,
        max_size=7,
    ),
    st.booleans(),
)
@settings(deadline=None)
def test_any_tensors_come_back_bit_for_bit(
    kinds: list[tuple[torch.dtype, int]], packs: bool
) -> None:
    """Shapes, strides, views of a shared storage and bytes stay; elements stay aligned.

    Packed, they come back as one storage without a gap.
    """
    tensors = [torch.arange(2 * n).to(dtype).view(2, n).t() for dtype, n in kinds]
    tensors.append(torch.arange(6.0).view(3, 2))
    tensors.append(tensors[-1][1:])
    expected = [(t.clone(), t.shape, t.stride(), t.dtype) for t in tensors]
    group = StorageGroup("optimizer", lambda: tensors, PLATFORM, HostPool(PLATFORM), packs=packs)
    total = group.num_bytes()
    for _ in range(3):
        for _ in range(2):  # the second call of each does nothing
            group.release()
            assert group.num_bytes() == 0
        assert not group.is_onloaded
        for _ in range(2):
            group.restore()
            assert group.is_onloaded and group.num_bytes() == total
        assert not packs or sum(s.nbytes() > 0 for s in storages_of(tensors)) == 1
        for tensor, (content, *form) in zip(tensors, expected, strict=True):
            assert [tensor.shape, tensor.stride(), tensor.dtype] == form
            assert torch.equal(tensor, content)
            assert tensor.data_ptr() % tensor.element_size() == 0
    tensors[-2].fill_(3)
    assert bool((tensors[-1] == 3).all()), "a view of it still is"


class CountedCopies(CpuPlatform):
    """Counts the calls that copy."""

    num_copies = 0

    def copies(self):  # type: ignore[no-untyped-def]
        self.num_copies += 1
        return super().copies()


def test_what_is_only_read_is_copied_to_the_host_once() -> None:
    """A reference leaves by being freed, until somebody writes it."""
    platform, tensor, writes = CountedCopies(), torch.arange(6.0), [1]
    pool = HostPool(platform)
    find = lambda: [tensor]  # noqa: E731
    group = StorageGroup("reference", find, platform, pool, num_writes=lambda: writes[0])
    for _ in range(3):
        group.release()
        group.restore()
        assert torch.equal(tensor, torch.arange(6.0))
    assert platform.num_copies == 1 + 3
    tensor += 1
    writes[0] += 1
    group.release()
    group.restore()
    assert torch.equal(tensor, torch.arange(6.0) + 1)
    assert platform.num_copies == 1 + 3 + 2
