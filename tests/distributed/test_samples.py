"""The engine layout decides nothing about what is sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.layout_samples import (
    NUM_SEQUENCES,
    asked,
    reference_logits,
    sampling_world,
    wins_within,
)
from support.spawn import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ENGINE_TPS = (1, 2)
# Of perturbed logits: the fp32 sums of two layouts differ by less.
NEAR_TIE = 1e-4
MOST_NEAR_TIES = 0.005

Samples = dict[int, list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def samples(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """The tokens of four engines of one rank, and of two engines of two."""
    result: Samples = {}
    for engine_tp in ENGINE_TPS:
        args = (str(tiny_model), engine_tp)
        ranks = run_ranks(sampling_world, 4, work_dir=tmp_path_factory.mktemp("tp"), args=args)
        assert all(rank == ranks[0] for rank in ranks)
        result[engine_tp] = ranks[0]
    return result


def test_engines_of_one_rank_and_of_two_sample_the_same(samples: Samples, tiny_model: Path) -> None:
    """256 sequences. Where two differ, both tokens won within 1e-4: the noise makes a near-tie."""
    first, second = (samples[tp] for tp in ENGINE_TPS)
    assert len(set(first)) > NUM_SEQUENCES // 2, "samples must be diverse"
    differing = [i for i in range(NUM_SEQUENCES) if first[i] != second[i]]
    assert len(differing) <= MOST_NEAR_TIES * NUM_SEQUENCES, differing
    logits = reference_logits(tiny_model, first)
    for i in differing:
        position = next(n for n, (a, b) in enumerate(zip(first[i], second[i])) if a != b)  # noqa: B905
        for tokens in (first[i], second[i]):
            candidates = torch.tensor([*first[i][:position], tokens[position]])
            won = wins_within(logits[i][: position + 1], asked()[i], candidates, NEAR_TIE)
            assert won[position], f"sample {i}, token {position}: no near-tie"


@pytest.mark.parametrize("engine_tp", ENGINE_TPS)
def test_every_token_is_the_one_that_the_seed_and_the_logits_give(
    engine_tp: int, samples: Samples, tiny_model: Path
) -> None:
    """The noise of the judge is that of the engine: it explains every token, and no other."""
    logits = reference_logits(tiny_model, samples[engine_tp])
    num_tokens = 0
    for request, rows, drawn in zip(asked(), logits, samples[engine_tp], strict=True):
        tokens = torch.tensor(drawn)
        num_tokens += len(tokens)
        assert wins_within(rows, request, tokens, NEAR_TIE).all(), request.sample_id
        others = (tokens + 1) % rows.shape[1]
        assert not wins_within(rows, request, others, NEAR_TIE).any(), request.sample_id
    assert num_tokens > 10 * NUM_SEQUENCES
