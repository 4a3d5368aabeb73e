"""Fused kernels: operators that do as documented give the numbers of the general kernel.

The kernels themselves do not run on a CPU. In their place are references in plain PyTorch; calls
are also checked against the signatures of the installed operators.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from ascend.emulator.operators import REFERENCES
from support.flash_reference import FlashReference, OlderFlashReference
from support.torch_varlen import OLDEST, installed_interface, parameters_of, snapshot
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_rl.attention import varlen
from mindspeed_rl.attention.context import ContextGroup
from mindspeed_rl.attention.kernels import KERNELS, AttentionPlan, Planner
from mindspeed_rl.attention.packed_plan import PackedPlan, packed_plan
from mindspeed_rl.attention.rows import make_packed_row
from mindspeed_rl.attention.tnd import MAX_PIECES, TndKernel
from mindspeed_rl.core.errors import UsageError

SIZES, TAIL, SCALE = (5, 1, 9, 2), 3, 0.3
# Heads of queries and of keys, channels of both and of values.
HEADS = {"grouped": (4, 2, 16, 16), "latent": (3, 3, 24, 16), "odd": (2, 1, 12, 12)}
CONTEXTS = {
    "alone": ContextGroup(),
    "first of gathered": ContextGroup(2, 0),
    "last of gathered": ContextGroup(4, 3),
    "ring": ContextGroup(4, 1, "p2p"),
}
FUSED = ("varlen", "tnd")


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    """References in place of the operators."""
    use_flash(FlashReference(), monkeypatch)
    for name in ("npu_fusion_attention", "npu_fusion_attention_grad"):
        monkeypatch.setattr(torch.ops.npu, name, REFERENCES[f"npu::{name}"], raising=False)


def use_flash(flash: FlashReference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", flash.forward)
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", flash.backward)


def blocks(kernel: str | Planner, context: ContextGroup) -> tuple[AttentionPlan, ...]:
    lengths = [2 * context.size * size for size in SIZES]
    tokens = 2 * (sum(SIZES) + TAIL)
    plan = KERNELS[kernel] if isinstance(kernel, str) else kernel
    return make_packed_row(lengths, torch.zeros(tokens), context, plan).blocks


def inputs(context: ContextGroup, heads: str) -> list[torch.Tensor]:
    """Queries, keys and values; gradients of the output and as many numbers again."""
    n, m, d, dv = HEADS[heads]
    tokens = 2 * (sum(SIZES) + TAIL)
    keys = tokens * (context.size if context.gathers else 1)
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, n, d), (keys, m, d), (keys, m, dv), (tokens, n, dv), (tokens, n, dv))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kernel", FUSED)
def test_a_fused_kernel_attends_as_the_general_one(kernel: str, context: str, heads: str) -> None:
    """Output and gradients through autograd; padding, gathered keys in the order of ranks."""
    group = CONTEXTS[context]
    *tensors, grad, _ = inputs(group, heads)
    found = []
    for name in (kernel, "padded_sdpa"):
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        out = blocks(name, group)[0].attend(q, k, v, SCALE)
        (out * grad).sum().backward()
        found.append((out, q.grad, k.grad, v.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_flash_attention_without_groups_attends_as_the_general_kernel(
    context: str, heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch 2.11: every block of a row, with its gradients; only whole groups are kept."""
    use_flash(OlderFlashReference(), monkeypatch)
    q, k, v, grad, _ = inputs(CONTEXTS[context], heads)
    every = [blocks(name, CONTEXTS[context]) for name in ("varlen", "padded_sdpa")]
    for plans in zip(*every, strict=True):
        found = []
        for plan in plans:
            out, lse = plan.forward(q, k, v, SCALE)
            found.append((out, lse, *plan.backward(grad, q, k, v, out, lse, SCALE)))
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_the_older_reference_is_that_of_the_wheel() -> None:
    """And what is called of the installed torch is what the snapshot says of its release."""
    known = snapshot()
    names = parameters_of(known[OLDEST]["varlen_attn"])
    assert names == [*inspect.signature(OlderFlashReference().forward).parameters]
    assert "enable_gqa" not in names
    installed = torch.__version__.partition("+")[0]
    assert installed_interface() == known[installed], "run python tests/support/torch_varlen.py"
    backward = [known[release]["_varlen_attn_backward"] for release in (OLDEST, installed)]
    assert backward[0] == backward[1], "VarlenKernel.backward passes one list of arguments"


def older_attention(query: object, *, return_aux: object = None, is_causal: bool = False) -> None:
    """The keywords of ``varlen_attn`` before it had a scale and a window."""


def test_a_torch_that_is_too_old_is_refused_when_the_model_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its flash attention has other arguments (2.10), or there is none (2.9)."""
    from mindspeed_rl.attention.kernels import planner

    with monkeypatch.context() as older:
        older.setattr(varlen, "varlen_attn", older_attention)
        with pytest.raises(UsageError, match=r"takes no scale and no window_size.*2\.11 or later"):
            planner("varlen", torch.bfloat16)
        assert planner("varlen", torch.float32) is KERNELS["padded_sdpa"]
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    monkeypatch.delitem(sys.modules, "mindspeed_rl.attention.varlen")
    with pytest.raises(UsageError, match=r"has no torch\.nn\.attention\.varlen.*2\.11 or later"):
        planner("varlen", torch.bfloat16)


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("kernel", FUSED)
def test_a_fused_kernel_computes_the_blocks_of_a_ring(kernel: str, block: int, heads: str) -> None:
    """Log-sum-exp, and gradients by an output and a log-sum-exp over more keys than its own."""
    group = CONTEXTS["ring"]
    q, k, v, grad, whole = inputs(group, heads)
    plans = [blocks(name, group)[block] for name in (kernel, "padded_sdpa")]
    found = []
    for plan in plans:
        out, lse = plan.forward(q, k, v, SCALE)
        total = torch.logaddexp(lse, 0.1 + q[..., 0])
        found.append((out, lse, *plan.backward(grad, q, k, v, whole, total, SCALE)))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert torch.isneginf(found[0][1]).any(), "tokens of no piece"


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_of_padding_has_a_backward_pass(kernel: str, context: str) -> None:
    """Layers in front get gradients of zero, not none, even where padding is not finite."""
    *tensors, grad, _ = inputs(CONTEXTS[context], "latent")
    tensors[0][0], tensors[1][1], tensors[2][2] = torch.inf, -torch.inf, torch.nan
    for plan in make_packed_row([], torch.zeros(8), CONTEXTS[context], KERNELS[kernel]).blocks:
        q, k, v = (x[:8].clone().requires_grad_() for x in tensors)
        out = plan.attend(q, k, v, SCALE)
        assert torch.equal(out, torch.zeros(8, 3, 16))
        out.backward(grad[:8])
        for x in (q, k, v):
            assert x.grad is not None and torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("kernel", FUSED)
def test_a_ring_may_have_one_query_of_each_sequence(kernel: str) -> None:
    """Chunks of one token: the queries that see the keys of later ranks."""
    q, k, v, grad, _ = (x[:4] for x in inputs(CONTEXTS["ring"], "grouped"))
    found = []
    for name in (kernel, "padded_sdpa"):
        row = make_packed_row([8, 8], torch.zeros(4), CONTEXTS["ring"], KERNELS[name])
        later = row.blocks[2]
        out, lse = later.forward(q, k, v, SCALE)
        found.append((out, lse, *later.backward(grad, q, k, v, out, lse, SCALE)))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("kernel", FUSED)
def test_fused_kernels_keep_nothing_squared(kernel: str) -> None:
    kept: list[int] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.numel())
        return x

    *tensors, _, _ = inputs(CONTEXTS["first of gathered"], "grouped")
    q, k, v = (x.requires_grad_() for x in tensors)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        blocks(kernel, CONTEXTS["first of gathered"])[0].attend(q, k, v, SCALE)
    assert sorted(kept) == sorted([q.numel(), k.numel(), v.numel(), q.numel(), q[..., 0].numel()])


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("kernel", FUSED)
def test_fused_kernels_keep_no_padded_channels(kernel: str) -> None:
    """Latent attention has fewer channels of values; a row without padding is not copied."""
    q, k, v, *_ = (x[: sum(SIZES)] for x in inputs(CONTEXTS["alone"], "latent"))
    row = make_packed_row(SIZES, torch.zeros(sum(SIZES)), plan=KERNELS[kernel])
    out, _ = row.blocks[0].forward(q, k, v, SCALE)
    assert out.shape == v.shape
    assert out.untyped_storage().nbytes() == out.nbytes


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("most", [1, 3, MAX_PIECES])
def test_more_pieces_than_the_npu_takes_are_several_calls(
    most: int, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four sequences or more, in calls of so many pieces; the last call has fewer."""
    group = CONTEXTS[context]
    calls: list[int] = []
    *tensors, grad, _ = inputs(group, "grouped")
    pieces = len(SIZES) * (2 if group.gathers else 1)
    for name in ("npu_fusion_attention", "npu_fusion_attention_grad"):
        reference = REFERENCES[f"npu::{name}"]

        def counted(*args: Any, reference: Any = reference, **options: Any) -> Any:
            calls.append(len(options["actual_seq_qlen"]))
            return reference(*args, **options)

        monkeypatch.setattr(torch.ops.npu, name, counted)
    found = []
    for plan in (partial(packed_plan, kernel=TndKernel(most)), KERNELS["padded_sdpa"]):
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        out = blocks(plan, group)[-1].attend(q, k, v, SCALE)
        (out * grad).sum().backward()
        found.append((out, q.grad, k.grad, v.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert calls == 2 * [min(most, pieces - first) for first in range(0, pieces, most)]


def test_a_platform_imports_no_kernel_of_another() -> None:
    """Older builds of PyTorch, as NPUs have them, have no ``torch.nn.attention.varlen``."""
    code = (
        "import sys, mindspeed_rl.attention.rows as _; "
        "print([n for n in sys.modules if n.endswith(('.varlen', '.tnd'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("block", [0, 1])
def test_the_installed_flash_attention_takes_the_call(block: int) -> None:
    """PyTorch's own operators on tensors without data: schema, shapes and types."""
    plan: Any = blocks("varlen", CONTEXTS["ring"])[block]
    assert isinstance(plan, PackedPlan)
    mode = FakeTensorMode()
    starts = {n: mode.from_tensor(getattr(plan.borders, n)) for n in ("query_starts", "key_starts")}
    borders = replace(plan.borders, **starts)
    num_queries, num_keys = plan.num_queries, plan.borders.key_ends[-1]
    with mode:
        q, grad = (torch.empty(num_queries, 4, 32, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.empty(num_keys, 2, 32, dtype=torch.bfloat16) for _ in range(2))
        out, lse = varlen.VARLEN.forward(q, k, v, borders, SCALE)
        found = varlen.VARLEN.backward(grad, q, k, v, out.float(), lse, borders, SCALE)
    assert out.shape == q.shape and out.dtype is torch.bfloat16
    assert lse.shape == (num_queries, 4) and lse.dtype is torch.float32
    assert [x.shape for x in found] == [x.shape for x in (q, k, v)]
