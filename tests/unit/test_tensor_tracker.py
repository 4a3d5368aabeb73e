"""Live bytes and peak of tensors, where the allocator does not count."""

from __future__ import annotations

import torch

from mindspeed_rl.observability.tensor_tracker import TensorTracker

KIB = 1024


def floats(kib: int) -> torch.Tensor:
    return torch.zeros(kib * KIB // 4)


def test_counts_what_lives_and_remembers_the_peak() -> None:
    with TensorTracker() as tracker:
        first = floats(4)
        second = floats(16)
        assert (tracker.live_bytes, tracker.peak_bytes) == (20 * KIB, 20 * KIB)
        del second
        assert (tracker.live_bytes, tracker.peak_bytes) == (4 * KIB, 20 * KIB)
        tracker.reset_peak()
        third = floats(1)
        assert tracker.peak_bytes == 5 * KIB
    assert first.numel() + third.numel() == 5 * KIB // 4


def test_views_and_writes_in_place_own_nothing() -> None:
    with TensorTracker() as tracker:
        whole = floats(8)
        half = whole[: KIB // 2].view(2, -1)
        half.add_(1.0)
        assert tracker.live_bytes == 8 * KIB
        del whole
        assert tracker.live_bytes == 8 * KIB, "the view keeps all of it"
        del half
        assert tracker.live_bytes == 0


def test_what_was_there_before_does_not_count() -> None:
    before = floats(8)
    with TensorTracker() as tracker:
        before.add_(1.0)
        part = before[:4]
        assert tracker.live_bytes == 0
        copy = part + 1
        assert tracker.live_bytes == 16
    assert copy.numel() == 4


def test_end_of_the_tracker_does_not_end_the_count() -> None:
    """Memory that is freed after the measured step is freed for it, too."""
    with TensorTracker() as tracker:
        kept = floats(2)
    assert tracker.live_bytes == 2 * KIB
    del kept
    assert tracker.live_bytes == 0


def test_sees_what_a_graph_keeps_and_what_backward_makes() -> None:
    weight = torch.ones(1, KIB // 4, requires_grad=True)
    with TensorTracker() as tracker:
        hidden = torch.exp(weight * 2)  # exp keeps its result; the product is freed
        loss = hidden.sum()
        del hidden
        assert tracker.live_bytes == KIB + loss.untyped_storage().nbytes()
        tracker.reset_peak()
        loss.backward()
        assert weight.grad is not None
        del loss
        assert tracker.live_bytes == KIB, "the gradient"
        assert 2 * KIB <= tracker.peak_bytes <= 4 * KIB


def test_storage_that_grows_counts_with_its_new_size() -> None:
    with TensorTracker() as tracker:
        tensor = floats(1)
        tensor.resize_(KIB)
        assert tracker.live_bytes == 4 * KIB
        tensor.untyped_storage().resize_(0)
        tensor.resize_(0)
        assert tracker.live_bytes == 0
