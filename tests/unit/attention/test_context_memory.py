"""What context parallelism needs for a moment, measured on its tensors, is what is predicted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.published import published_config
from support.tensor_tracker import TensorTracker

from mindspeed_rl.attention import exchange, ring
from mindspeed_rl.attention.context import ContextGroup, context_group
from mindspeed_rl.attention.packed_plan import packed_plan
from mindspeed_rl.attention.rows import attend, make_packed_row
from mindspeed_rl.config import TrainConfig
from mindspeed_rl.core.context_parallelism import ContextParallelism
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.planning.activations import TrainingMemory, Workload
from mindspeed_rl.samples.packing import context_index
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

CP, HEADS, KEY_HEADS, CHANNELS = 4, 8, 2, 16
LENGTHS = [2 * CP * size for size in (50, 31, 19)]
KINDS = {
    "all_gather": ContextParallelism("all_gather"),
    "p2p": ContextParallelism("p2p", ring=CP),
    "a2a": ContextParallelism("a2a", ulysses=CP),
    "a2a+p2p": ContextParallelism("a2a+p2p", ulysses=2, ring=CP // 2),
}


class SilentKernel:
    """A fused kernel that needs no memory but for its results."""

    def forward(self, q: Any, k: Any, v: Any, borders: Any, scale: float) -> Any:
        return q.new_zeros(*q.shape[:2], v.size(2)), q.new_zeros(q.shape[:2], dtype=torch.float32)

    def backward(self, grad: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges that fill what they would with zeros."""

    def fill(target: torch.Tensor, *_: Any, **__: Any) -> None:
        target.zero_()

    silent = SimpleNamespace(
        all_gather_into_tensor=fill,
        reduce_scatter_tensor=fill,
        all_to_all_single=fill,
        isend=None,
        irecv=None,
        P2POp=lambda *_, **__: None,
        batch_isend_irecv=lambda _: [],
    )
    monkeypatch.setattr(exchange, "dist", silent)
    monkeypatch.setattr(ring, "dist", silent)


def of_backward(context: ContextGroup, dtype: torch.dtype) -> int:
    """Most bytes that a backward pass has besides what the forward pass kept."""
    lengths = [length * context.size // CP for length in LENGTHS]  # always as many on a rank
    index = context_index(lengths, sum(lengths), context.size, context.rank)
    row = make_packed_row(lengths, index, context, lambda p: packed_plan(p, SilentKernel()))
    shapes = ((HEADS, CHANNELS), (KEY_HEADS, CHANNELS), (KEY_HEADS, CHANNELS))
    inputs = [torch.ones(len(index), *shape, dtype=dtype).requires_grad_() for shape in shapes]
    with TensorTracker() as tracker:
        out = attend(*inputs, row)
        gradient = torch.ones_like(out)
        before = tracker.live_bytes
        tracker.reset_peak()
        out.backward(gradient)
    return tracker.peak_bytes - before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_of_context_parallelism_are_predicted(kind: str, dtype: torch.dtype) -> None:
    chosen = KINDS[kind]
    context = context_group(kind, CP, 1, chosen.ulysses)
    measured = of_backward(context, dtype) - of_backward(ContextGroup(), dtype)
    sizes = {"hidden_size": HEADS * CHANNELS, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS}
    layout = MegatronLayout(
        spec_from_hf_config(published_config("qwen2.5-7b") | sizes | heads),
        ParallelLayout.build(world=CP, stages=even_stages(1), cp=CP),
    )
    train = TrainConfig(bf16=dtype is torch.bfloat16)
    memory = TrainingMemory(layout, train, False, context=chosen)
    work = Workload(sum(LENGTHS), sum(LENGTHS), 1)
    predicted = memory.context_buffers(0, work)
    assert measured <= predicted <= 1.5 * measured
