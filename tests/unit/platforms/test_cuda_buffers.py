"""Memory of the host that the CUDA platform registers, over a runtime that writes down calls."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from mindspeed_rl.platforms.cuda import CudaPlatform


class Runtime:
    """What ``torch.cuda.cudart`` gives, as far as it registers memory."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.status = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0 and size > 0 and address not in self.registered
        if self.status == 0:
            self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()

    def check_error(status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA error {status}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    return found


def platform() -> Any:
    """Without a device, which a buffer of the host does not need."""
    return CudaPlatform.__new__(CudaPlatform)


def test_a_buffer_is_registered_as_long_as_it_lives(runtime: Runtime) -> None:
    """With exactly its bytes: torch's own allocator would take 4096 for 3000."""
    first, second = platform().host_buffer(3000), platform().host_buffer(77)
    for buffer, size in ((first, 3000), (second, 77)):
        assert buffer.dtype is torch.uint8 and buffer.shape == (size,) and buffer.is_cpu
        assert buffer.untyped_storage().nbytes() == size
    assert runtime.registered == {first.data_ptr(): 3000, second.data_ptr(): 77}
    kept = second.data_ptr()
    del first, buffer
    gc.collect()
    second.fill_(1)
    assert runtime.registered == {kept: 77}
    del second
    gc.collect()
    assert runtime.registered == {}


def test_an_empty_buffer_is_not_registered(runtime: Runtime) -> None:
    assert platform().host_buffer(0).shape == (0,)
    assert runtime.registered == {}


def test_memory_that_cannot_be_registered_is_an_error(runtime: Runtime) -> None:
    """And is not given back to the runtime, which does not have it."""
    runtime.status = 2
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        platform().host_buffer(64)
    gc.collect()
    assert runtime.registered == {}
