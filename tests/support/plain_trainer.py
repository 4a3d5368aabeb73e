"""GRPO without the product: transformers, autograd, torch's AdamW, one process, one sample a time.

It repeats the updates of a run from its dumped rollouts. Everything is written as in the papers;
nothing of mindspeed_rl is imported.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of the run that is repeated."""

    group_size: int
    samples_per_update: int
    lr: float
    warmup: int
    clip_grad: float
    eps_lower: float
    eps_upper: float
    kl_beta: float
    entropy_weight: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0


def response_logits(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """[response, vocabulary] log p of every token at the places that predict the response."""
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    logits: torch.Tensor = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1]
    return logits.log_softmax(-1)


def picked(logp: torch.Tensor, row: dict[str, Any]) -> torch.Tensor:
    return logp[range(len(row["response_ids"])), row["response_ids"]]


def advantages(rows: Sequence[dict[str, Any]], group_size: int) -> list[float]:
    """(r - mean) / (std + 1e-4) of the group; 0 in a group of equal rewards."""
    result = []
    for start in range(0, len(rows), group_size):
        rewards = [row["reward"] for row in rows[start : start + group_size]]
        mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
        result += [(r - mean) / (std + 1e-4) if std > 1e-4 else 0.0 for r in rewards]
    return result


def update_loss(
    model: Any,
    reference: Any,
    rows: Sequence[tuple[dict[str, Any], float, torch.Tensor]],
    recipe: Recipe,
) -> torch.Tensor:
    """Token mean of the clipped loss, the k3 KL and the entropy bonus."""
    total, tokens = torch.zeros(()), 0
    for row, advantage, old in rows:
        everything = response_logits(model, row)
        logp = picked(everything, row)
        ratio = (logp - old).exp()
        bounded = ratio.clamp(1 - recipe.eps_lower, 1 + recipe.eps_upper)
        loss = -torch.minimum(ratio * advantage, bounded * advantage)
        with torch.no_grad():
            ref = picked(response_logits(reference, row), row)
        loss = loss + recipe.kl_beta * ((ref - logp).exp() - (ref - logp) - 1)
        entropy = -(everything.exp() * everything).sum(-1)
        total = total + (loss - recipe.entropy_weight * entropy).sum()
        tokens += len(logp)
    return total / tokens


def replay(
    model_dir: Path, steps: Iterable[Sequence[dict[str, Any]]], recipe: Recipe
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights by HF name after all updates, and the norm of every gradient."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    # an engine may sample the padding token, and then it is a token like any other
    model.get_input_embeddings().padding_idx = None
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    norms: list[float] = []
    for rows in steps:
        with torch.no_grad():  # the policy that sampled, before the first update of the step
            old = [picked(response_logits(model, row), row) for row in rows]
        samples = list(zip(rows, advantages(rows, recipe.group_size), old, strict=True))
        for start in range(0, len(samples), recipe.samples_per_update):
            part = samples[start : start + recipe.samples_per_update]
            optimizer.zero_grad()
            update_loss(model, reference, part, recipe).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad)
            norms.append(float(norm))
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * min(1.0, len(norms) / recipe.warmup)
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def dumped_steps(file: Path) -> list[list[dict[str, Any]]]:
    """The rollouts of every step, by sample id."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], []).append(row)
    return [sorted(steps[s], key=lambda row: row["sample_id"]) for s in sorted(steps)]
