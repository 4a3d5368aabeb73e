"""The emulated device as the product sees it; that the emulator computes, its users prove."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.ascend_emul


@pytest.fixture(autouse=True, scope="module")
def emulated() -> None:
    from ascend.emulator.device import emulate

    emulate()
    torch.npu.set_device(0)


def test_the_platform_sees_what_torch_does_not_count() -> None:
    """Communicators and the engine's pool are beside torch's allocator."""
    from mindspeed_rl.platforms.npu import NpuPlatform

    platform = NpuPlatform()
    platform.set_device()
    cann, block = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p()
    before, reserved = platform.memory(), torch.npu.memory_reserved()
    assert platform.taken_bytes == before.used_bytes == before.total_bytes - before.free_bytes
    assert cann.aclrtMalloc(ctypes.byref(block), ctypes.c_size_t(32 << 20), 0) == 0
    after = platform.memory()
    assert cann.aclrtFree(block) == 0
    assert after.used_bytes - before.used_bytes == before.free_bytes - after.free_bytes == 32 << 20
    assert torch.npu.memory_reserved() == reserved


def test_expandable_segments_are_switched_in_a_running_process() -> None:
    """torch_npu maps memory or allocates it, as we last said; all of it goes back."""
    from mindspeed_rl.platforms.npu_allocator import set_expandable_segments

    torch.npu.empty_cache()
    free = torch.npu.mem_get_info()[0]
    found = []
    for on in (True, False, True, False):
        set_expandable_segments(on)
        block = torch.arange(8 << 20, device="npu")
        segments = [s for s in torch.npu.memory_snapshot() if s["total_size"] >= 64 << 20]
        found += [segment["is_expandable"] for segment in segments]
        assert free - torch.npu.mem_get_info()[0] >= 64 << 20
        assert int(block.sum()) == (1 << 22) * ((8 << 20) - 1)
        del block
        torch.npu.empty_cache()
        assert torch.npu.mem_get_info()[0] == free
    assert found == [True, False, True, False]


def test_a_kernel_outside_the_emulation_fails() -> None:
    """A process that forgot to emulate gets an error, not zeros."""
    script = "import torch; x = torch.ones(4).to('npu:0'); (x + x).cpu(); torch.npu.synchronize()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode and "operator name is Add" in done.stderr


def test_private_formats_are_as_they_were() -> None:
    """torch_npu's option, which vLLM-Ascend's runner switches on when it is imported."""
    import torch_npu

    from mindspeed_rl.platforms.npu_changes import ProcessChanges

    def option() -> str:
        return str(torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT").decode())

    found = []
    for before in (False, True):
        torch.npu.config.allow_internal_format = before
        changes = ProcessChanges()
        torch.npu.config.allow_internal_format = not before
        found.append(option())
        changes.undo()
        found.append(option())
    torch.npu.config.allow_internal_format = False
    assert found == ["enable", "disable", "disable", "enable"]
