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
from mindspeed_rl.platforms.storages import not_among, num_bytes, storages_of

PLATFORM = CpuPlatform()


def group_of(*tensors: torch.Tensor, keep: bool = True) -> StorageGroup:
    pool = HostPool(PLATFORM) if keep else None
    return StorageGroup("group", lambda: tensors, PLATFORM, pool)


def test_views_stay_valid_and_every_byte_counts_once() -> None:
    """As with megatron-core's buffers: parameters, their shards and gradients are views of them."""
    buffer = torch.arange(24.0)
    matrix, shard = buffer[:12].view(3, 4), buffer[6:12]
    parameter = torch.nn.Parameter(matrix)
    group = group_of(parameter.data, shard, buffer)
    assert group.num_bytes() == 96
    group.release()
    assert (group.num_bytes(), group.resident, num_bytes(storages_of([shard]))) == (0, False, 0)
    group.restore()
    assert group.resident and torch.equal(buffer, torch.arange(24.0))
    parameter.data.fill_(7.0)
    assert torch.equal(shard, torch.full((6,), 7.0)), "the views share memory as before"


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


@given(
    st.lists(
        st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]), st.integers(0, 9)),
        max_size=6,
    ),
    st.integers(1, 3),
)
@settings(deadline=None)
def test_any_tensors_come_back_bit_for_bit(
    kinds: list[tuple[torch.dtype, int]], cycles: int
) -> None:
    generator = torch.Generator().manual_seed(len(kinds))
    tensors = [
        torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .view(-1)
        for dtype, size in kinds
    ]
    expected = [t.clone() for t in tensors]
    group = group_of(*tensors)
    for _ in range(cycles):
        for _ in range(2):  # the second call of each does nothing
            group.release()
            assert group.num_bytes() == 0
        for _ in range(2):
            group.restore()
    for found, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


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
    assert pool.num_bytes == 110
    pool.region("optimizer", 120)
    assert pool.num_bytes == 130


def test_memory_in_use_is_not_released() -> None:
    tensor = torch.ones(4)

    def in_use() -> None:
        raise RuntimeError("gradients are accumulated")

    group = StorageGroup("gradients", lambda: [tensor], PLATFORM, None, before_release=in_use)
    with pytest.raises(RuntimeError, match="accumulated"):
        group.release()
    assert group.resident and torch.equal(tensor, torch.ones(4))


class FullDevice(CpuPlatform):
    """Copies to the device fail while ``full``."""

    full = False

    def copies(self):  # type: ignore[no-untyped-def]
        if self.full:
            raise torch.OutOfMemoryError("no memory")
        return super().copies()


def test_a_failing_copy_changes_nothing() -> None:
    platform = FullDevice()
    tensor = torch.arange(5.0)
    group = StorageGroup("parameters", lambda: [tensor], platform, HostPool(platform))
    platform.full = True
    with pytest.raises(torch.OutOfMemoryError):
        group.release()
    assert group.resident and torch.equal(tensor, torch.arange(5.0))
    platform.full = False
    group.release()
    platform.full = True
    with pytest.raises(torch.OutOfMemoryError):
        group.restore()
    assert not group.resident and group.num_bytes() == 0
    platform.full = False
    group.restore()
    assert torch.equal(tensor, torch.arange(5.0))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float64]),
            st.integers(1, 40),
        ),
        min_size=2,
        max_size=7,
    )
)
@settings(deadline=None)
def test_packed_tensors_come_back_as_one_storage_without_a_gap(
    kinds: list[tuple[torch.dtype, int]],
) -> None:
    """Shapes, strides, views of a shared storage and bytes stay; elements stay aligned."""
    tensors = [torch.arange(2 * n).to(dtype).view(2, n).t() for dtype, n in kinds]
    tensors.append(tensors[0][1:])
    expected = [(t.clone(), t.shape, t.stride(), t.dtype) for t in tensors]
    group = StorageGroup("optimizer", lambda: tensors, PLATFORM, HostPool(PLATFORM), packs=True)
    total = group.num_bytes()
    for _ in range(3):
        group.release()
        assert group.num_bytes() == 0
        group.restore()
        assert [s.nbytes() for s in storages_of(tensors)] == [total]
        for tensor, (content, *form) in zip(tensors, expected, strict=True):
            assert [tensor.shape, tensor.stride(), tensor.dtype] == form
            assert torch.equal(tensor, content)
            assert tensor.data_ptr() % tensor.element_size() == 0
    tensors[0].fill_(3)
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


def test_tensors_are_told_apart_by_storage() -> None:
    buffer = torch.zeros(8)
    own = torch.zeros(2)
    assert [t is own for t in not_among([buffer[2:4], own], [buffer])] == [True]
