"""Real engines: the same tokens with experts on other ranks, and every token counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from make_tiny_model import write_tiny_model
from support.placement_world import CountedRun, counting_world, placement_world
from support.spawn import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_tokens_do_not_depend_on_the_places_of_experts(tmp_path: Path) -> None:
    """Two ranks that share the experts of a Qwen3-MoE; each layer has places of its own."""
    model = str(write_tiny_model(tmp_path / "model", family="qwen3_moe"))
    for run in run_ranks(placement_world, 2, work_dir=tmp_path, args=(model,)):
        assert run.linear.keys() == run.moved.keys() and run.linear
        for i, expected in run.linear.items():
            assert run.moved[i].token_ids == expected.token_ids
            assert run.moved[i].logprobs == pytest.approx(expected.logprobs, abs=2e-5)
        changed = [i for i, c in run.linear.items() if run.unaware[i].token_ids != c.token_ids]
        assert changed, "places matter"
        assert "no update is open" in run.refused


def counted_by_transformers(model: str, runs: Iterable[CountedRun]) -> list[Counter[int]]:
    """Tokens of each expert and layer that transformers' model finds for the same sequences.

    The last token of a response is sampled but not read.
    """
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    k = reference.config.num_experts_per_tok
    sequences = {i: (*r.prompts[i], *c.token_ids) for r in runs for i, c in r.completions.items()}
    found: list[Counter[int]] = [Counter() for _ in range(reference.config.num_hidden_layers)]
    for tokens in sequences.values():
        with torch.no_grad():
            output = reference(torch.tensor([tokens[:-1]]), output_router_logits=True)
        for counter, logits in zip(found, output.router_logits, strict=True):
            counter.update(logits.topk(k).indices.flatten().tolist())
    return found


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, "--rollout-tp 1 --rollout-dp 2 --rollout-ep 2"),
        (4, "--rollout-tp 2 --rollout-dp 2 --rollout-ep 4"),  # ranks cut the batch of a layer
        (4, "--rollout-tp 2 --rollout-ep 2"),  # two engines
    ],
)
def test_every_token_is_counted_once_and_no_dummy(tmp_path: Path, world: int, flags: str) -> None:
    """The last group has no requests at first, then the only one: others step without any."""
    model = str(write_tiny_model(tmp_path / "model", family="qwen3_moe"))
    runs = run_ranks(counting_world, world, work_dir=tmp_path, args=(model, flags.split()))
    load = sum(run.load for run in runs)
    assert isinstance(load, torch.Tensor)
    expected = counted_by_transformers(model, runs)
    experts = range(load.shape[1])
    assert load.tolist() == [[counter[e] for e in experts] for counter in expected]
    assert len({tuple(row) for row in load.tolist()}) == len(load), "layers differ"
    if "dp" in flags:
        assert runs[-1].dummy_steps > 0
