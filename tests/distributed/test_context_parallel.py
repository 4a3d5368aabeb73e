"""Every kind of context parallelism is one rank's attention: outputs and all gradients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.attention_oracle import attention_of_row
from support.spawn import run_ranks

if TYPE_CHECKING:
    from mindspeed_rl.launch.bootstrap import World

pytestmark = pytest.mark.distributed

# Relative to the largest number, in fp32; measured: 6e-7.
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of queries and of keys, channels of both and of values."""

    queries: int
    keys: int
    channels: int
    values: int


GROUPED = Heads(8, 2, 16, 16)  # with four ranks fewer heads of keys than ranks
UNEVEN = Heads(12, 3, 8, 8)  # heads of keys that the ranks do not divide
LATENT = Heads(4, 4, 24, 16)
# Lengths over 2 x ranks: uneven, of two chunks alone, and with padding behind them.
SIZES, TAIL = (5, 1, 9, 2), 3
KINDS = {"all_gather": 1, "p2p": 1, "a2a": 1, "a2a+p2p": 2}
# Ranks of the world -> the groups that rows have.
GROUPS = {2: ([[0, 1]],), 3: ([[0, 1, 2]],), 4: ([[0, 1, 2, 3]], [[0, 2], [1, 3]])}
# In bf16, which has only every second number from 256 on, a sum of these one by one is too small.
PARTS = (256.0, 1.0, 1.0, 2.0)


def errors(world: World, *_: Any) -> dict[str, float]:
    """Rank function: case -> largest difference over the largest number of output and gradients."""
    import torch.distributed as dist

    from mindspeed_rl.attention.context import context_group

    found = {}
    for layout in GROUPS[world.size]:
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in layout}
        ranks = next(ranks for ranks in groups if world.rank in ranks)
        for kind, ulysses in KINDS.items():
            place = dist.get_group_rank(groups[ranks], world.rank)
            context = context_group(kind, len(ranks), place, ulysses, groups[ranks])
            if kind == "all_gather":
                found[f"bf16/{len(ranks)}"] = _error_of_sum(context)
            for name, heads in (("grouped", GROUPED), ("uneven", UNEVEN), ("latent", LATENT)):
                if heads.queries % context.ulysses:
                    continue
                seed = min(ranks)  # rows of other groups have other numbers
                case = f"{kind}/{name}/{len(ranks)}"
                found[case] = max(found.get(case, 0.0), _error(context, heads, seed))
    return found


def _error_of_sum(context: Any) -> float:
    """Of the gradient of gathered keys in bf16 to the sum, rounded once."""
    from mindspeed_rl.attention.exchange import gather_keys

    mine = torch.zeros(3, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    keys, _ = gather_keys(mine, mine.detach(), context)
    (keys * PARTS[context.rank]).sum().backward()
    total = torch.tensor(sum(PARTS[: context.size])).bfloat16()
    assert mine.grad is not None and mine.grad.dtype == torch.bfloat16
    return float((mine.grad - total).abs().max())


def _error(context: Any, heads: Heads, seed: int) -> float:
    from mindspeed_rl.attention.rows import attend, make_packed_row
    from mindspeed_rl.samples.packing import context_index

    lengths = [2 * context.size * size for size in SIZES]
    total = sum(lengths) + 2 * context.size * TAIL
    generator = torch.Generator().manual_seed(seed)

    def drawn(number: int, channels: int) -> torch.Tensor:
        return torch.randn(total, number, channels, generator=generator)

    inputs = [
        drawn(heads.queries, heads.channels),
        drawn(heads.keys, heads.channels),
        drawn(heads.keys, heads.values),
    ]
    weight = drawn(heads.queries, heads.values)
    index = context_index(lengths, total, context.size, context.rank)
    row = make_packed_row(lengths, index, context)
    mine = [x[index].requires_grad_() for x in inputs]
    out = attend(*mine, row, scale=0.3)
    (out * weight[index]).sum().backward()
    whole = [x.clone().requires_grad_() for x in inputs]
    expected = attention_of_row(*whole, lengths, 0.3)
    (expected * weight).sum().backward()
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, whole, strict=True))]
    return max(float((a - b[index]).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("ranks", GROUPS)
def test_every_kind_is_the_attention_of_one_rank(ranks: int, tmp_path: Path) -> None:
    """Uneven rows with padding; an odd ring; groups of some ranks that are no neighbours.

    Of the models only one has heads that three ranks divide.
    """
    number = {2: 12 + 1, 3: 3 * 3 + 1 + 1, 4: 2 * (12 + 1)}[ranks]
    for found in run_ranks(errors, ranks, work_dir=tmp_path):
        assert len(found) == number
        assert {case: error for case, error in found.items() if not error <= TOLERANCE} == {}
