"""The log-prob head by blocks, and its weight gradient in megatron-core's gradient buffers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from mindspeed_rl.core import logit_tiles
from mindspeed_rl.core.logit_tiles import LogitTile, logit_tile
from mindspeed_rl.trainer.logprobs import selected_logprobs
from mindspeed_rl.trainer.weight_gradient import WeightGradient

TOKENS, HIDDEN, IDS, PADDED, TEMPERATURE, ENTROPY_WEIGHT = 23, 16, 307, 320, 0.7, 0.3
MICRO_BATCHES = 2


def inputs(micro: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Targets, ids of embedded tokens, and weights of both outputs, of a micro-batch."""
    generator = torch.Generator().manual_seed(micro)
    targets, ids = torch.randint(0, IDS, (2, TOKENS), generator=generator)
    targets[0], targets[1] = 0, IDS - 1
    return targets, ids, *torch.randn(2, TOKENS, generator=generator)


def weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    return hidden.to(dtype), torch.randn(PADDED, HIDDEN, generator=generator).to(dtype)


def loss_of(
    micro: int, weight: torch.Tensor, tied: bool, head: Callable[..., Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    targets, ids, of_logprobs, of_entropy = inputs(micro)
    hidden = weights(weight.dtype)[0]
    states = hidden + (torch.nn.functional.embedding(ids, weight) if tied else 0.0)
    logprobs, entropy = head(states, weight, targets)
    of = (of_logprobs.to(logprobs.dtype), of_entropy.to(logprobs.dtype))
    return (of[0] * logprobs + ENTROPY_WEIGHT * of[1] * entropy).sum(), logprobs.detach()


def exact(states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Any:
    logp = (states @ weight[:IDS].t() / TEMPERATURE).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def ours(into: WeightGradient | None) -> Callable[..., Any]:
    def head(states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Any:
        return selected_logprobs(
            states, weight, targets, temperature=TEMPERATURE, vocab_size=IDS, tp_rank=0,
            group=None, into=into,
        )  # fmt: skip

    return head


def expected(tied: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of the weight over all micro-batches, and log-probs of the last, in fp64."""
    weight = weights(torch.float64)[1].requires_grad_()
    found = [loss_of(micro, weight, tied, exact) for micro in range(MICRO_BATCHES)]
    (gradient,) = torch.autograd.grad(sum(loss for loss, _ in found), weight)  # type: ignore[arg-type]
    return gradient, found[-1][1]


def in_buffer(weight: torch.nn.Parameter, overlaps: bool) -> list[bool]:
    """Give the weight a gradient buffer and the hook of DistributedDataParallel (0.16.1)."""
    weight.main_grad = torch.zeros(weight.shape)
    weight.grad_added_to_main_grad = False
    ready: list[bool] = []

    def hook(*unused: Any) -> None:
        if overlaps:
            assert weight.grad is not None, "not safe when overlap_grad_reduce is True"
        zeroed = getattr(weight, "zero_out_wgrad", False)
        if weight.grad is not None and (not weight.grad_added_to_main_grad or zeroed):
            weight.main_grad.add_(weight.grad)
        weight.grad = None
        ready.append(True)

    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(hook)
    weight.node = node  # the hook lives as long as the node
    return ready


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks of tokens times ten of ids."""
    monkeypatch.setattr(logit_tiles, "_HOST_ROWS", 7)
    monkeypatch.setattr(logit_tiles, "_HOST_BYTES", 4 * 7 * 32)
    assert logit_tile(0, TOKENS, IDS, on_host=True) == LogitTile(7, 32)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_the_buffer_gets_the_gradient_of_every_micro_batch_once(
    overlaps: bool, tied: bool, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocks:
        small_blocks(monkeypatch)
    weight = torch.nn.Parameter(weights(torch.float32)[1])
    ready = in_buffer(weight, overlaps)
    if tied:  # GPTModel sets it for a tied embedding whose layers are on one stage
        weight.zero_out_wgrad = True
    for micro in range(MICRO_BATCHES):
        loss, logprobs = loss_of(micro, weight, tied, ours(WeightGradient(overlaps=overlaps)))
        loss.backward()
    gradient, closed_form = expected(tied)
    assert relative(weight.main_grad, gradient) <= 1e-6
    assert float((logprobs - closed_form).abs().max()) <= 1e-6 * float(closed_form.abs().max())
    assert not weight.main_grad[IDS:].any() and weight.grad is None
    assert len(ready) == MICRO_BATCHES or not overlaps


def test_hidden_states_get_the_gradient_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    targets, _, of_logprobs, of_entropy = inputs(0)
    gradients = []
    for dtype, head in ((torch.float64, exact), (torch.float32, ours(None))):
        states, weight = weights(dtype)
        logprobs, entropy = head(states.requires_grad_(), weight.requires_grad_(), targets)
        loss = (of_logprobs * logprobs + of_entropy * entropy).sum()
        gradients.append(torch.autograd.grad(loss, states)[0])
    assert relative(gradients[1], gradients[0]) <= 1e-6


def test_without_a_buffer_autograd_gets_the_gradient() -> None:
    weight = torch.nn.Parameter(weights(torch.float32)[1])
    for micro in range(MICRO_BATCHES):
        loss_of(micro, weight, True, ours(None))[0].backward()
    assert weight.grad is not None
    assert relative(weight.grad, expected(tied=True)[0]) <= 1e-6


def test_gradients_of_a_bfloat16_weight_are_summed_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_blocks(monkeypatch)
    weight = torch.nn.Parameter(weights(torch.bfloat16)[1])
    in_buffer(weight, overlaps=False)
    for micro in range(MICRO_BATCHES):
        loss_of(micro, weight, False, ours(WeightGradient()))[0].backward()
    assert weight.main_grad.dtype is torch.float32
    error = relative(weight.main_grad, expected(tied=False)[0])
    assert error <= 2e-2, "precision of bf16 logits"


def test_the_fused_kernel_adds_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of Apex's extension, whose kernel adds to the buffer by itself."""
    double = ModuleType("fused_weight_gradient_mlp_cuda")

    def accumulate(hidden: torch.Tensor, grad: torch.Tensor, total: torch.Tensor) -> None:
        assert total.is_contiguous() and grad.is_contiguous() and hidden.is_contiguous()
        total.add_(grad.t() @ hidden)

    double.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, double.__name__, double)
    small_blocks(monkeypatch)
    weight = torch.nn.Parameter(weights(torch.float32)[1])
    in_buffer(weight, overlaps=False)
    for micro in range(MICRO_BATCHES):
        loss_of(micro, weight, False, ours(WeightGradient(fused=True)))[0].backward()
    assert relative(weight.main_grad, expected(tied=False)[0]) <= 1e-6


@pytest.mark.parametrize(
    ("chunk", "on_host", "tokens", "tile"),
    [
        (0, True, 4000, LogitTile(1024, 1024)),
        (0, True, 64, LogitTile(64, 16384)),
        (0, False, 4096, LogitTile(4096, 65536)),
        (0, False, 1000, LogitTile(1000, 151936)),
        (300, False, 4096, LogitTile(300, 151936)),
        (300, True, 40, LogitTile(40, 151936)),
        (0, True, 0, LogitTile(0, 151936)),
    ],
)
def test_blocks_follow_the_flag_or_memory(
    chunk: int, on_host: bool, tokens: int, tile: LogitTile
) -> None:
    assert logit_tile(chunk, tokens, 151936, on_host=on_host) == tile
