"""GRPO and PPO without the product: transformers, autograd, AdamW, one process, a sample a time.

It repeats the updates of a run from its dumped rollouts. Everything is written as in the papers;
nothing of mindspeed_rl is imported.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification


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
    temperature: float = 1.0
    min_lr: float | None = None  # reached at the last update, linearly; None: the rate stays
    kl_target: float = 0.0  # 0: the coefficient stays
    kl_horizon: float = 10000.0

    def flags(self) -> list[str]:
        """That a run without temperature, decay and an adapted KL has these settings."""
        return [
            "--global-batch-size", str(self.samples_per_update), "--lr", str(self.lr),
            "--lr-warmup-iters", str(self.warmup), "--clip-grad", str(self.clip_grad),
            "--weight-decay", str(self.weight_decay), "--grpo-kl-beta", str(self.kl_beta),
            "--grpo-clamp-eps-lower", str(self.eps_lower),
            "--grpo-clamp-eps-upper", str(self.eps_upper),
            "--grpo-entropy-term-weight", str(self.entropy_weight),
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class CriticRecipe:
    """Settings of the critic of a PPO run; it has the policy's optimizer but for its rate."""

    lr: float
    value_clip: float
    discount: float
    trace_decay: float
    warmup_steps: int


class Replayed(NamedTuple):
    """Weights by HF name after all updates, and the norm of every gradient.

    ``kl`` is the mean per token of every step that updated the policy, ``kl_beta`` the coefficient
    after the last, ``clipped`` the tokens held back by the lower and by the upper bound.
    """

    weights: dict[str, torch.Tensor]
    norms: list[float]
    critic: dict[str, torch.Tensor]
    critic_norms: list[float]
    kl: list[float]
    kl_beta: float
    clipped: tuple[int, int]


@dataclass
class Seen:
    """What the updates of one step saw, summed over tokens."""

    tokens: int = 0
    kl: float = 0.0
    below: int = 0
    above: int = 0


def response_logits(model: Any, row: dict[str, Any], temperature: float) -> torch.Tensor:
    """[response, vocabulary] log p of every token at the places that predict the response."""
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    logits: torch.Tensor = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


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
    rows: Sequence[tuple[dict[str, Any], Any, torch.Tensor]],
    recipe: Recipe,
    kl_beta: float,
    seen: Seen,
) -> torch.Tensor:
    """Token mean of the clipped loss, the k3 KL and the entropy bonus."""
    total, tokens = torch.zeros(()), 0
    for row, advantage, old in rows:
        everything = response_logits(model, row, recipe.temperature)
        logp = picked(everything, row)
        ratio = (logp - old).exp()
        bounded = ratio.clamp(1 - recipe.eps_lower, 1 + recipe.eps_upper)
        loss = -torch.minimum(ratio * advantage, bounded * advantage)
        seen.below += int(((ratio < 1 - recipe.eps_lower) & (loss > -ratio * advantage)).sum())
        seen.above += int(((ratio > 1 + recipe.eps_upper) & (loss > -ratio * advantage)).sum())
        if kl_beta:
            with torch.no_grad():
                ref = picked(response_logits(reference, row, recipe.temperature), row)
            kl = (ref - logp).exp() - (ref - logp) - 1
            seen.kl += float(kl.detach().sum())
            loss = loss + kl_beta * kl
        entropy = -(everything.exp() * everything).sum(-1)
        total = total + (loss - recipe.entropy_weight * entropy).sum()
        tokens += len(logp)
    seen.tokens += tokens
    return total / tokens


def adapted(kl_beta: float, kl: float, recipe: Recipe, num_samples: int) -> float:
    """The coefficient of the next step (Ziegler et al. 2019, section 2.2)."""
    if not recipe.kl_target:
        return kl_beta
    error = min(0.2, max(-0.2, kl / recipe.kl_target - 1))
    return kl_beta * (1 + error * min(1.0, num_samples / recipe.kl_horizon))


def values_of(critic: Any, row: dict[str, Any]) -> torch.Tensor:
    """[response] the value before every token of the response."""
    ids, start = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
    hidden = critic.model(torch.tensor([ids])).last_hidden_state[0, start - 1 : -1]
    return critic.score(hidden)[:, 0]  # type: ignore[no-any-return]


def gae(row: dict[str, Any], values: torch.Tensor, recipe: CriticRecipe) -> torch.Tensor:
    """[response] advantages; the reward comes with the last token."""
    result, last, after, reward = torch.zeros_like(values), 0.0, 0.0, row["reward"]
    for t in reversed(range(len(values))):
        error = reward + recipe.discount * after - float(values[t])
        result[t] = last = error + recipe.discount * recipe.trace_decay * last
        after, reward = float(values[t]), 0.0
    return result


def value_loss(
    critic: Any,
    rows: Sequence[tuple[Any, torch.Tensor, torch.Tensor]],
    recipe: CriticRecipe,
) -> torch.Tensor:
    """Token mean of half the larger squared error, of the value and of the bounded value."""
    total, tokens = torch.zeros(()), 0
    for row, old, target in rows:
        value, bound = values_of(critic, row), recipe.value_clip
        bounded = old + (value - old).clamp(-bound, bound)
        total = total + torch.maximum((value - target) ** 2, (bounded - target) ** 2).sum() / 2
        tokens += len(value)
    return total / tokens


class Trained:
    """A model with its AdamW; the rate falls to the recipe's at update ``num_updates``."""

    def __init__(self, model: Any, recipe: Recipe, lr: float, num_updates: int) -> None:
        # an engine may sample the padding token, and then it is a token like any other
        model.get_input_embeddings().padding_idx = None
        self.model, self.recipe, self.lr, self.num_updates = model, recipe, lr, num_updates
        self.norms: list[float] = []
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=lr, betas=recipe.betas, weight_decay=recipe.weight_decay
        )

    def rate(self, update: int) -> float:
        """Of an update, counted from 1."""
        warmup, low = self.recipe.warmup, self.recipe.min_lr
        if update <= warmup:
            return self.lr * update / warmup
        if low is None:
            return self.lr
        return self.lr + (low - self.lr) * (update - warmup) / (self.num_updates - warmup)

    def update(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad)
        self.norms.append(float(norm))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(len(self.norms))
        self.optimizer.step()


def replay(
    model_dir: Path,
    steps: Sequence[Sequence[dict[str, Any]]],
    recipe: Recipe,
    ppo: CriticRecipe | None = None,
    after_step: Callable[[int, Any], None] = lambda step, policy: None,
) -> Replayed:
    """All updates of a run; the value head starts at 0.

    Args:
        model_dir: a Hugging Face checkpoint.
        steps: the dumped rollouts.
        recipe: settings of the run.
        ppo: those of its critic.
        after_step: called with the policy after every step, and as step 0 before the first.
    """
    updates = [-(-len(rows) // recipe.samples_per_update) for rows in steps]
    load = AutoModelForCausalLM.from_pretrained
    waiting = ppo.warmup_steps if ppo else 0
    model, reference = (load(model_dir, dtype=torch.float32) for _ in range(2))
    policy = Trained(model, recipe, recipe.lr, sum(updates[waiting:]))
    classifier = AutoModelForSequenceClassification.from_pretrained(
        model_dir, dtype=torch.float32, num_labels=1
    )
    classifier.score.weight.data.zero_()
    critic = Trained(classifier, recipe, ppo.lr if ppo else 0.0, sum(updates))
    kl_beta, kls, clipped = recipe.kl_beta, [], [0, 0]
    after_step(0, policy.model)
    for number, rows in enumerate(steps, 1):
        with torch.no_grad():  # the models that sampled, before the first update of the step
            old = [picked(response_logits(model, row, recipe.temperature), row) for row in rows]
            values = [values_of(classifier, row) if ppo else torch.zeros(0) for row in rows]
        given: Sequence[Any] = advantages(rows, recipe.group_size)
        if ppo:
            raw = [gae(row, v, ppo) for row, v in zip(rows, values, strict=True)]
            returns = [a + v for a, v in zip(raw, values, strict=True)]
            given = [(a - torch.cat(raw).mean()) / torch.cat(raw).std() for a in raw]
        parts = [
            slice(start, start + recipe.samples_per_update)
            for start in range(0, len(rows), recipe.samples_per_update)
        ]
        for part in parts if ppo else ():
            targets = list(zip(rows[part], values[part], returns[part], strict=True))
            critic.update(value_loss(classifier, targets, ppo))
        seen = Seen()
        for part in parts if number > waiting else ():
            samples = list(zip(rows[part], given[part], old[part], strict=True))
            policy.update(update_loss(model, reference, samples, recipe, kl_beta, seen))
        if seen.tokens:
            kls.append(seen.kl / seen.tokens)
            kl_beta = adapted(kl_beta, kls[-1], recipe, len(rows))
        clipped = [clipped[0] + seen.below, clipped[1] + seen.above]
        after_step(number, policy.model)
    weights = [{n: p.detach() for n, p in t.model.named_parameters()} for t in (policy, critic)]
    return Replayed(
        weights[0], policy.norms, weights[1], critic.norms, kls, kl_beta, (clipped[0], clipped[1])
    )


def dumped_steps(file: Path) -> list[list[dict[str, Any]]]:
    """The rollouts of every step, by sample id."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], []).append(row)
    return [sorted(steps[s], key=lambda row: row["sample_id"]) for s in sorted(steps)]


def worst_error(
    folder: Path, export: str, weights: dict[str, torch.Tensor], *, of_change: bool
) -> float:
    """Error of an exported weight, relative to its norm or to that of its change.

    A weight that the first model does not have started at 0.
    """
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(folder / "out" / export / "model.safetensors")
    assert after.keys() == weights.keys()
    errors = [
        (after[n] - w).norm() / (w - before.get(n, 0.0) if of_change else w).norm()
        for n, w in weights.items()
    ]
    return float(max(errors))


def means_of_pairs(norms: Sequence[float]) -> list[float]:
    """Over the two updates of every step."""
    return [sum(pair) / 2 for pair in zip(norms[::2], norms[1::2], strict=True)]
