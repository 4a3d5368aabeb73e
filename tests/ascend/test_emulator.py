"""The emulator itself: memory is counted, kernels compute, what is not emulated fails."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.ascend_emul
TOLERANCE = 1e-5  # two orders of summing in fp32; how far apart depends on the processor


@pytest.fixture(autouse=True, scope="module")
def emulated() -> None:
    from ascend.emulator.device import emulate

    emulate()
    torch.npu.set_device(0)


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return [g.cpu() for g in torch.autograd.grad(loss, leaves)]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_driver_counts_memory() -> None:
    torch.npu.empty_cache()
    free = torch.npu.mem_get_info()[0]
    block = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
    assert free - torch.npu.mem_get_info()[0] >= 64 << 20
    block.untyped_storage().resize_(0)
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] == free


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


@pytest.mark.parametrize("layout", ["TND", "SBH"])
def test_fused_attention_is_attention(layout: str) -> None:
    """Grouped heads, causal; two sequences of TND, two batches of SBH."""
    import torch_npu

    torch.manual_seed(1)
    q, k, v = torch.randn(10, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)
    borders = ((0, 4), (4, 10)) if layout == "TND" else ((0, 5), (5, 10))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    pieces = []
    for start, end in borders:
        heads = [x[start:end].transpose(0, 1)[None] for x in leaves]
        heads[1:] = [x.repeat_interleave(2, 1) for x in heads[1:]]
        out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3)
        pieces.append(out[0].transpose(0, 1))
    expected = torch.cat(pieces)
    weight = torch.randn_like(expected)
    on_npu = [x.detach().to("npu").requires_grad_() for x in leaves]
    given = on_npu
    options = {"actual_seq_qlen": [4, 10], "actual_seq_kvlen": [4, 10]}
    if layout == "SBH":
        given = [x.reshape(2, 5, -1).transpose(0, 1).contiguous() for x in on_npu]
        options = {}
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).to("npu")
    found = torch_npu.npu_fusion_attention(
        *given, 4, layout, atten_mask=mask, scale=0.3, sparse_mode=2, **options
    )[0]
    if layout == "SBH":
        found = found.transpose(0, 1).reshape(10, 4, 8)
    assert_close([found.detach().cpu()], [expected.detach()])
    assert_close(
        gradients((found * weight.to("npu")).sum(), *on_npu),
        gradients((expected * weight).sum(), *leaves),
    )


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_torch_is_the_fused_one(masked: bool) -> None:
    """torch_npu sends it to the same operator, whose mask says what is hidden."""
    torch.manual_seed(3)
    leaves = [torch.randn(2, heads, 6, 8, requires_grad=True) for heads in (4, 2, 2)]
    on_npu = [x.detach().to("npu").requires_grad_() for x in leaves]
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    mask[1, :, :, 0] = False
    mask[1, :, 0, 0] = True
    options = {"is_causal": not masked, "scale": 0.3, "enable_gqa": True}
    results = []
    for tensors in (on_npu, leaves):
        seen = mask.to(tensors[0].device) if masked else None
        out = F.scaled_dot_product_attention(*tensors, attn_mask=seen, **options)
        results.append([out.detach().cpu(), *gradients(out.pow(3).sum(), *tensors)])
    assert_close(*results)


def test_fused_norm_and_activation_are_what_they_say() -> None:
    import torch_npu

    torch.manual_seed(2)
    x, gamma = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    on_npu = [t.detach().to("npu").requires_grad_() for t in (x, gamma)]
    found = torch_npu.npu_rms_norm(*on_npu, epsilon=1e-5)[0]
    expected = F.rms_norm(x, (8,), gamma, 1e-5)
    assert_close(gradients(found.pow(3).sum(), *on_npu), gradients(expected.pow(3).sum(), x, gamma))
    gate, up = x.chunk(2, -1)
    assert_close(
        gradients(torch_npu.npu_swiglu(on_npu[0]).pow(2).sum(), on_npu[0]),
        gradients((F.silu(gate) * up).pow(2).sum(), x),
    )


def test_an_operator_without_reference_fails() -> None:
    import torch_npu

    with pytest.raises(NotImplementedError, match="npu::npu_gelu"):
        torch_npu.npu_gelu(torch.randn(4).to("npu"), approximate="none")


def test_a_kernel_outside_the_emulation_fails() -> None:
    """A process that forgot to emulate gets an error, not zeros."""
    script = "import torch; x = torch.ones(4).to('npu:0'); (x + x).cpu(); torch.npu.synchronize()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode and "operator name is Add" in done.stderr
