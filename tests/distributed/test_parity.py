"""Log-probs and entropies of the trainer equal those of transformers in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from support.spawn import run_ranks
from support.training_layouts import LAYOUT_PARAMETERS

from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.trainer.logprobs import selected_logprobs

if TYPE_CHECKING:
    from pathlib import Path

    from support.family_models import FamilyReference
    from support.training_worlds import WorldResult

pytestmark = pytest.mark.distributed

# Largest difference of one token in nats, log-probs of up to -16, from transformers in fp64.
# Measured on one rank: 2.2e-6. Tensor parallelism takes the sums of row-parallel layers in another
# order.
TOLERANCE = 5e-6
TOLERANCE_BF16 = 0.1  # measured: 3.2e-2


def largest_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    assert [x.shape for x in a] == [y.shape for y in b]
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("layout", LAYOUT_PARAMETERS)
def test_every_case_equals_transformers(
    layout: str,
    trained: Callable[[str], WorldResult],
    reference: dict[tuple[str, float], FamilyReference],
) -> None:
    world = trained(layout)
    assert world.cases
    for name, case in world.cases.items():
        key = ("tied" if "tied" in name else "tiny", 0.7 if "cold" in name else 1.0)
        expected = reference[key]
        limit = TOLERANCE_BF16 if "bf16" in name else TOLERANCE
        assert largest_difference(case.logprobs, expected.logprobs) <= limit, name
        assert largest_difference(case.entropies, expected.entropies) <= limit, name


@pytest.mark.parametrize("layout", LAYOUT_PARAMETERS)
def test_pass_without_gradients_gives_the_same_bits(
    layout: str, trained: Callable[[str], WorldResult]
) -> None:
    """One micro-batch plan for both passes, so the ratio of the first step is exactly 1."""
    for name, case in trained(layout).cases.items():
        assert largest_difference(case.logprobs, case.annotated) == 0.0, name


def test_temperature_and_tied_embeddings_matter(
    reference: dict[tuple[str, float], FamilyReference],
) -> None:
    """Else the comparisons above could not tell the variants apart."""
    base = reference["tiny", 1.0].logprobs
    for other in (("tiny", 0.7), ("tied", 1.0)):
        assert largest_difference(base, reference[other].logprobs) > 0.1


# --- selected_logprobs alone: 2 x 160 rows hold 307 ids; of 2 x 128 rows with 100 ids the second
# rank's are all padding
NUM_TOKENS, HIDDEN, TEMPERATURE = 23, 16, 0.7
CHUNKS = (1, 7, 1024)
USES = ("both", "log-probs", "entropies")  # which outputs the loss uses
VOCABULARIES = ((307, 160), (100, 128))


def selection_inputs(vocab_size: int, rows: int) -> tuple[torch.Tensor, ...]:
    """hidden [N, h], padded weight [2 rows, h], targets [N], weights of the two outputs [2, N]."""
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    # padding rows are as large as real ones: counting them would show
    weight = torch.randn(2 * rows, HIDDEN, generator=generator)
    targets = torch.randint(0, vocab_size, (NUM_TOKENS,), generator=generator)
    targets[0], targets[1] = 0, vocab_size - 1
    return hidden, weight, targets, torch.randn(2, NUM_TOKENS, generator=generator)


def loss_of(
    use: str, picked: torch.Tensor, entropy: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    terms = {"log-probs": scale[0] * picked, "entropies": scale[1] * entropy}
    return sum(
        (term.sum() for name, term in terms.items() if use in ("both", name)), torch.zeros(())
    )


def full_softmax(vocab_size: int, rows: int, use: str = "both") -> list[torch.Tensor]:
    """log-probs, entropies and both gradients by autograd over the whole vocabulary, in fp64."""
    hidden, weight, targets, scale = (
        t.double() if t.is_floating_point() else t for t in selection_inputs(vocab_size, rows)
    )
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = hidden @ weight[:vocab_size].t() / TEMPERATURE
    logp = logits.log_softmax(-1)
    picked = logp.gather(-1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    loss = loss_of(use, picked, entropy, scale)
    return [picked.detach(), entropy.detach(), *torch.autograd.grad(loss, (hidden, weight))]


def chunked(
    vocab_size: int,
    rows: int,
    chunk: int,
    rank: int,
    group: dist.ProcessGroup | None,
    use: str = "both",
) -> list[torch.Tensor]:
    """The same from this rank's rows; the gradient of ``hidden`` is this rank's share."""
    hidden, weight, targets, scale = selection_inputs(vocab_size, rows)
    mine = weight if group is None else weight[rank * rows : (rank + 1) * rows]
    mine = mine.clone().requires_grad_()
    hidden.requires_grad_()
    picked, entropy = selected_logprobs(
        hidden,
        mine,
        targets,
        temperature=TEMPERATURE,
        vocab_size=vocab_size,
        tp_rank=rank,
        group=group,
        chunk=chunk,
    )
    loss = loss_of(use, picked, entropy, scale)
    return [picked.detach(), entropy.detach(), *torch.autograd.grad(loss, (hidden, mine))]


COLD = 60.0  # factor of the logits: one rank's largest may be hundreds below the other's


def cold_logprobs(world: World) -> torch.Tensor:
    """[N] log-probs of a nearly greedy policy."""
    vocab_size, rows = VOCABULARIES[0]
    hidden, weight, targets, _ = selection_inputs(vocab_size, rows)
    picked, _ = selected_logprobs(
        COLD * hidden,
        weight[world.rank * rows : (world.rank + 1) * rows],
        targets,
        temperature=TEMPERATURE,
        vocab_size=vocab_size,
        tp_rank=world.rank,
        group=dist.group.WORLD,
        chunk=CHUNKS[0],
    )
    return picked


def chunked_on_two_ranks(
    world: World,
) -> tuple[dict[tuple[int, int], list[torch.Tensor]], torch.Tensor]:
    assert dist.group.WORLD is not None
    results = {}
    for vocab_size, rows in VOCABULARIES:
        for chunk in CHUNKS:
            picked, entropy, grad_hidden, grad_weight = chunked(
                vocab_size, rows, chunk, world.rank, dist.group.WORLD
            )
            dist.all_reduce(grad_hidden)
            parts = [torch.empty_like(grad_weight) for _ in range(world.size)]
            dist.all_gather(parts, grad_weight)
            results[vocab_size, chunk] = [picked, entropy, grad_hidden, torch.cat(parts)]
    return results, cold_logprobs(world)


def assert_close(
    found: list[torch.Tensor], expected: list[torch.Tensor], limit: float = 1e-6
) -> None:
    for name, a, b in zip(
        ("log-probs", "entropies", "hidden", "weight"), found, expected, strict=True
    ):
        assert a.isfinite().all(), name
        assert float((a.double() - b).norm() / b.norm()) <= limit, name


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("vocab_size", "rows"), VOCABULARIES)
def test_selection_equals_full_softmax_on_one_rank(
    vocab_size: int, rows: int, chunk: int, use: str
) -> None:
    found = chunked(vocab_size, rows, chunk, 0, None, use)
    # entropies alone: log p + H cancels, measured 2e-6
    assert_close(found, full_softmax(vocab_size, rows, use), 4e-6 if use == "entropies" else 1e-6)


def test_selection_equals_full_softmax_on_two_ranks(tmp_path: Path) -> None:
    (first, cold), (second, _) = run_ranks(chunked_on_two_ranks, 2, work_dir=tmp_path)
    for vocab_size, rows in VOCABULARIES:
        expected = full_softmax(vocab_size, rows)
        assert float(expected[3][vocab_size:].abs().max()) == 0.0
        for chunk in CHUNKS:
            assert_close(first[vocab_size, chunk], expected)
            for a, b in zip(first[vocab_size, chunk], second[vocab_size, chunk], strict=True):
                assert torch.equal(a, b)
    vocab_size, rows = VOCABULARIES[0]
    hidden, weight, targets, _ = selection_inputs(vocab_size, rows)
    logits = COLD * (hidden.double() @ weight[:vocab_size].double().t()) / TEMPERATURE
    expected_cold = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    shards = logits[:, :rows].amax(-1) - logits[:, rows:].amax(-1)
    assert shards.abs().max() > 104, "exp of the difference is 0 in fp32"
    torch.testing.assert_close(cold.double(), expected_cold, rtol=1e-5, atol=1e-3)
