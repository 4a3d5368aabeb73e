"""The fused attention of packed rows on emulated NPUs: real schemas, numbers of plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from support.attention_oracle import attention_of_row

pytestmark = pytest.mark.ascend_emul

SIZES, TAIL, SCALE = (5, 1, 9, 2), 3, 0.3
# Heads of queries and of keys, channels of both and of values.
HEADS = {"grouped": (4, 2, 16, 16), "latent": (3, 3, 24, 16)}


@pytest.fixture(autouse=True, scope="module")
def emulated() -> None:
    from ascend.emulator.device import emulate

    emulate()
    torch.npu.set_device(0)


def drawn(total: int, heads: str) -> list[torch.Tensor]:
    """Queries, keys, values, and a gradient of the output."""
    n, m, d, dv = HEADS[heads]
    generator = torch.Generator().manual_seed(0)
    shapes = ((n, d), (m, d), (m, dv), (n, dv))
    return [torch.randn(total, *shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("heads", HEADS)
def test_a_row_of_one_rank(heads: str) -> None:
    """Uneven sequences and padding, through autograd."""
    from mindspeed_rl.attention.kernels import KERNELS
    from mindspeed_rl.attention.rows import attend, make_packed_row

    total, device = sum(SIZES) + TAIL, torch.device("npu:0")
    *tensors, grad = drawn(total, heads)
    row = make_packed_row(SIZES, torch.arange(total), plan=KERNELS["tnd"]).to(device)
    mine = [x.to(device).requires_grad_() for x in tensors]
    out = attend(*mine, row, scale=SCALE)
    (out * grad.to(device)).sum().backward()
    plain = [x.clone().requires_grad_() for x in tensors]
    expected = attention_of_row(*plain, SIZES, SCALE)
    (expected * grad).sum().backward()
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, plain, strict=True))]
    for found, wanted in pairs:
        assert found is not None and wanted is not None
        torch.testing.assert_close(found.cpu(), wanted.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
def test_the_blocks_of_a_ring_add_up_to_the_row(heads: str) -> None:
    """Statistics of TND, and gradients by them."""
    from support.ring_blocks import ring_attention_of_blocks

    lengths = [4 * size for size in SIZES]
    *tensors, grad = drawn(sum(lengths) + 4 * TAIL, heads)
    plain = [x.clone().requires_grad_() for x in tensors]
    expected = attention_of_row(*plain, lengths, SCALE)
    (expected * grad).sum().backward()
    device = torch.device("npu:0")
    out, found = ring_attention_of_blocks("tnd", 2, lengths, tensors, grad, SCALE, device)
    torch.testing.assert_close(out, expected.detach().float(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-5, atol=1e-5)
