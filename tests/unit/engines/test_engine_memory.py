"""An engine's memory leaves as pages on a host and as storages on a device."""

from __future__ import annotations

import mmap

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.engines.vllm import engine_memory
from mindspeed_rl.engines.vllm.engine_memory import ZeroedMemory


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def test_pages_leave_the_process_and_addresses_stay() -> None:
    tensor = torch.ones(64 << 20, dtype=torch.uint8)
    memory, address, before = ZeroedMemory([tensor]), tensor.data_ptr(), resident_bytes()
    memory.free()
    assert before - resident_bytes() > 0.95 * tensor.nbytes
    memory.bring_back()
    assert before - resident_bytes() > 0.9 * tensor.nbytes, "pages come back when they are touched"
    assert tensor.data_ptr() == address, "what keeps the address goes on"
    assert torch.count_nonzero(tensor) == 0
    tensor.fill_(3)
    assert memory.num_bytes == tensor.nbytes == int(tensor.to(torch.int64).sum()) // 3


@pytest.mark.parametrize("on_host", [True, False])
@given(
    st.lists(st.integers(0, 3 * mmap.PAGESIZE + 5), min_size=1, max_size=6),
    st.integers(1, 3),
)
@settings(deadline=None)
def test_everything_is_zero_and_neighbours_are_untouched(
    on_host: bool, sizes: list[int], cycles: int
) -> None:
    """Every other tensor of one allocation-sized batch is freed; the rest must not notice."""
    with pytest.MonkeyPatch.context() as patch:
        if not on_host:
            patch.setattr(engine_memory, "discard_pages", lambda address, num_bytes: False)
        tensors = [torch.full((size,), 7, dtype=torch.uint8) for size in sizes]
        views = [t[1:] for t in tensors]
        memory = ZeroedMemory(tensors[::2])
        for _ in range(cycles):
            memory.free()
            memory.free()
            memory.bring_back()
            assert all(torch.count_nonzero(t) == 0 for t in (*tensors[::2], *views[::2]))
            assert all(bool((t == 7).all()) for t in tensors[1::2])
            for tensor in tensors[::2]:
                tensor.fill_(7)
