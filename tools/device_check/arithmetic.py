"""The smallest stages: the arithmetic that everything else stands on, against the CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from device_check.child import Setting
from device_check.ranks import note_device
from device_check.results import Notes, Recorder, StageFailed
from mindspeed_rl.launch import bootstrap, machine

if TYPE_CHECKING:
    import torch

    from mindspeed_rl.platforms.base import Platform

LENGTHS, PADDING, HEADS, GROUPS, CHANNELS = (7, 128, 1, 300), 12, 4, 2, 64
TOKENS, HIDDEN, VOCABULARY, TEMPERATURE = 64, 896, 8192, 0.7
# Of the largest number of the reference: what rounding to bfloat16 and back may change, and fp32.
HALF_TOLERANCE, FULL_TOLERANCE = 2e-2, 1e-4


def arithmetic(setting: Setting, recorder: Recorder) -> None:
    """Run checksum, attention and head; a wrong one does not keep the others from running."""
    bootstrap.prepare_environment(setting.platform, os.environ)
    machine.check_machine(setting.platform, os.environ)
    from mindspeed_rl.platforms.registry import select_platform

    platform = select_platform(setting.platform)
    machine.bind_device(platform)
    note_device(setting.folder, platform)
    wrong = 0
    for name, stage in (("checksum", checksum), ("attention", attention), ("head", head)):
        with _counted() as failed, recorder.stage(name) as notes:
            stage(setting, platform, notes)
        wrong += len(failed)
    if wrong:
        raise StageFailed(f"{wrong} of 3 stages of arithmetic failed")


@contextmanager
def _counted() -> Iterator[list[BaseException]]:
    """Collect and print the error of a block, which is a result already."""
    errors: list[BaseException] = []
    try:
        yield errors
    except Exception as error:
        import traceback

        traceback.print_exc()
        errors.append(error)


def checksum(setting: Setting, platform: Platform, notes: Notes) -> None:
    """Compare the checksum of a matrix that spans several blocks."""
    import torch

    from mindspeed_rl.core.boxes import Box
    from mindspeed_rl.proof.checksums import box_checksum

    values = torch.randn(3001, 1024, generator=torch.Generator().manual_seed(1))
    shape = (3001, 1024)
    box = Box.whole(shape)
    for dtype in (torch.bfloat16, torch.float32):
        expected = box_checksum(values, box, shape, dtype).tolist()
        there = values.to(platform.device)
        found = box_checksum(there, box, shape, dtype).tolist()
        if found != expected:
            raise StageFailed(
                f"checksum of a {str(dtype)[6:]} matrix: {found} on {platform.device}, "
                f"{expected} on the CPU: 32-bit integers do not wrap around there"
            )
    seconds = _timed(platform, lambda: box_checksum(there, box, shape, torch.bfloat16))
    notes.figures["read_gb_per_s"] = values.numel() * 4 / seconds / 1e9


def attention(setting: Setting, platform: Platform, notes: Notes) -> None:
    """Compare the platform's kernel, and its gradients, with plain softmax of each sequence."""
    import torch

    from mindspeed_rl.attention.kernels import planner
    from mindspeed_rl.attention.rows import attend, make_packed_row

    dtype = torch.bfloat16 if setting.half else torch.float32
    total = sum(LENGTHS) + PADDING
    generator = torch.Generator().manual_seed(2)
    shapes = ((total, HEADS, CHANNELS), (total, GROUPS, CHANNELS), (total, GROUPS, CHANNELS))
    host = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    grad = torch.randn(shapes[0], generator=generator).to(dtype)
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in (*LENGTHS, PADDING)])
    name = platform.transformer_features().packed_attention
    row = make_packed_row(LENGTHS, positions, None, planner(name, dtype)).to(platform.device)
    q, k, v = (x.to(platform.device, copy=True).requires_grad_() for x in host)
    out = attend(q, k, v, row)
    out.backward(grad.to(platform.device))  # type: ignore[no-untyped-call]
    expected = plain_attention(host[0], host[1], host[2], grad)
    assert q.grad is not None and k.grad is not None and v.grad is not None
    for what, found, right in zip(
        ("output", "dq", "dk", "dv"), (out, q.grad, k.grad, v.grad), expected, strict=True
    ):
        notes.figures[f"{what}_error"] = _compare(f"{name} attention, {what}", found, right, dtype)
    notes.text = f"kernel {name} in {str(dtype)[6:]}"


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor
) -> list[torch.Tensor]:
    """Return output and gradients of causal attention, each sequence by itself, in float64."""
    import torch

    q, k, v = (x.to(torch.float64, copy=True).requires_grad_() for x in (q, k, v))
    out = torch.zeros(q.shape, dtype=torch.float64)
    start = 0
    for length in LENGTHS:
        mine = slice(start, start + length)
        keys, values = (x[mine].repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
        scores = torch.einsum("qhc,khc->hqk", q[mine], keys) / CHANNELS**0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        out[mine] = torch.einsum("hqk,khc->qhc", weights, values)
        start += length
    (out * grad.double()).sum().backward()  # type: ignore[no-untyped-call]
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [out.detach(), q.grad, k.grad, v.grad]


def head(setting: Setting, platform: Platform, notes: Notes) -> None:
    """Compare log-probs, entropies and gradients of a head in fp32 with those of whole logits."""
    import torch

    from mindspeed_rl.trainer.logprobs import selected_logprobs

    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator) * 2 / HIDDEN**0.5
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)

    x, w = (t.to(platform.device, copy=True).requires_grad_() for t in (hidden, weight))
    logprobs, entropy = selected_logprobs(
        x, w, targets.to(platform.device), temperature=TEMPERATURE, vocab_size=VOCABULARY,
        tp_rank=0, group=None,
    )  # fmt: skip
    (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and w.grad is not None
    for what, found, right in zip(
        ("logprob", "entropy", "dhidden", "dweight"),
        (logprobs, entropy, x.grad, w.grad),
        plain_head(hidden, weight, targets),
        strict=True,
    ):
        error = _compare(f"head, {what}", found, right, torch.float32)
        notes.figures[f"{what}_error"] = error


def plain_head(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> list[torch.Tensor]:
    """Return log-probs, entropies and gradients from whole logits, in float64."""
    import torch

    x, w = (t.to(torch.float64, copy=True).requires_grad_() for t in (hidden, weight))
    logp = (x @ w.t() / TEMPERATURE).log_softmax(-1)
    chosen = logp.gather(-1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    (chosen.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and w.grad is not None
    return [chosen.detach(), entropy.detach(), x.grad, w.grad]


def _compare(what: str, found: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference, as a part of the largest number of the reference.

    Raises:
        StageFailed: It is above the tolerance of the precision, or no number.
    """
    limit = HALF_TOLERANCE if dtype.itemsize == 2 else FULL_TOLERANCE
    difference = (found.detach().cpu().double() - right.double()).abs().max()
    error = float(difference / right.double().abs().max())
    if not error <= limit:
        raise StageFailed(
            f"{what}: differs by {error:.2g} of its largest number; {limit:g} is fine"
        )
    return error


def _timed(platform: Platform, work: Callable[[], object]) -> float:
    """Return the seconds of the second of two calls, with the wait for the device."""
    for _ in range(2):
        platform.synchronize()
        begin = time.perf_counter()
        work()
        platform.synchronize()
        seconds = time.perf_counter() - begin
    return seconds
