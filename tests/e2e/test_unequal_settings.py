"""One whole PPO run in which no two settings are equal, killed and resumed in the middle.

Real megatron-core and real vLLM on two data-parallel ranks. Its numbers are those of a plain
trainer (transformers and torch) that is given nothing but the dumped rollouts. Equal settings, or
schedules whose end nothing looks at, would hide exchanged flags.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plain_trainer import (
    CriticRecipe,
    Recipe,
    Replayed,
    dumped_steps,
    means_of_pairs,
    replay,
    worst_error,
)
from support.whole_runs import COMMON, rows_of, run_entry, write_inputs
from transformers import AutoTokenizer

pytestmark = pytest.mark.e2e

STEPS, PROMPTS, GROUP, SAVE_INTERVAL, RESPONSE = 5, 4, 4, 2, 7
RECIPE = Recipe(
    group_size=GROUP,
    samples_per_update=8,
    lr=4e-3,
    min_lr=5e-4,
    warmup=2,
    clip_grad=2.5,
    eps_lower=0.1,
    eps_upper=0.25,
    kl_beta=0.05,
    kl_target=0.25,
    kl_horizon=20.0,
    entropy_weight=0.01,
    weight_decay=0.1,
    temperature=0.7,
)
PPO = CriticRecipe(lr=7e-3, value_clip=0.02, discount=0.98, trace_decay=0.9, warmup_steps=1)


def flags() -> list[str]:
    return [
        *COMMON, "--use-distributed-optimizer", "--reward-function", "reward.py:digits",
        "--eval-prompt-data", "heldout.jsonl", "--eval-interval", "2", "--max-prompt-length", "16",
        "--rollout-max-response-length", str(RESPONSE), "--train-iters", str(STEPS),
        "--grpo-prompts-per-step", str(PROMPTS), "--grpo-group-size", str(GROUP),
        "--micro-batch-size", "3", "--rl-default-temperature", str(RECIPE.temperature),
        "--min-lr", str(RECIPE.min_lr), "--lr-decay-style", "linear",
        "--rl-kl-target", str(RECIPE.kl_target), "--rl-kl-horizon", str(RECIPE.kl_horizon),
        *RECIPE.flags(), "--rl-advantage-estimator", "gae", "--critic-lr", str(PPO.lr),
        "--value-clip", str(PPO.value_clip), "--gae-lambda", str(PPO.trace_decay),
        "--rl-gamma", str(PPO.discount), "--critic-warmup-steps", str(PPO.warmup_steps),
        "--log-rollouts", str(PROMPTS * GROUP), "--log-rollout-tokens",
        "--output-dir", "out", "--export-hf", "out/hf", "--critic-export-hf", "out/critic",
        "--save", "out/save", "--save-interval", str(SAVE_INTERVAL),
    ]  # fmt: skip


def run_job(folder: Path, *more: str, fault: str = "") -> str:
    """Train, or resume; what the job said. With a fault it must end by it."""
    ended = run_entry(folder, [*flags(), *more], fault=fault)
    assert (ended.returncodes == (0,)) == (not fault), ended.output
    return ended.output


class GreedyEvaluation:
    """The mean reward of greedy answers to held-out prompts, by transformers alone."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        self.prompts = [
            self.ids(json.loads(line)["prompt"])
            for line in (folder / "heldout.jsonl").read_text().splitlines()
        ]
        self.rewards: dict[int, float] = {}

    def ids(self, messages: list[dict[str, str]]) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return ids

    def __call__(self, step: int, policy: Any) -> None:
        found = [self.reward(policy, prompt) for prompt in self.prompts]
        self.rewards[step] = sum(found) / len(found)

    @torch.no_grad()
    def reward(self, policy: Any, prompt: list[int]) -> float:
        said: list[int] = []
        while len(said) < RESPONSE and self.tokenizer.eos_token_id not in said:
            said.append(int(policy(torch.tensor([[*prompt, *said]])).logits[0, -1].argmax()))
        text = self.tokenizer.decode(said, skip_special_tokens=True)
        return sum(c.isdigit() for c in text) / (1 + len(text))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that was killed while it saved step 4, and resumed from step 2."""
    folder = tmp_path_factory.mktemp("unequal")
    write_inputs(folder, STEPS * PROMPTS, heldout=6, family="llama")
    run_job(folder, fault="1:save:2:kill")
    (folder / "before.jsonl").write_text((folder / "out" / "rollouts.jsonl").read_text())
    said = run_job(folder, "--load", "out/save")
    assert "resuming after step 2 " in said
    return folder


@pytest.fixture(scope="module")
def metrics(folder: Path) -> list[dict[str, float]]:
    return rows_of(folder / "out")


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[Replayed, dict[int, float]]:
    """The plain trainer's updates, and its greedy reward after every step."""
    evaluation = GreedyEvaluation(folder)
    steps = dumped_steps(folder / "out" / "rollouts.jsonl")
    assert [len(rows) for rows in steps] == [PROMPTS * GROUP] * STEPS
    return replay(folder / "model", steps, RECIPE, PPO, evaluation), evaluation.rewards


def test_the_policy_is_the_plain_trainers(
    folder: Path, metrics: list[dict[str, float]], plain: tuple[Replayed, dict[int, float]]
) -> None:
    """Clip bounds, temperature, KL and its coefficient, entropy, schedule, decay, clipping."""
    found, _ = plain
    trained = [r for r in metrics if "optimizer/grad_norm" in r]
    assert len(found.norms) == 2 * (STEPS - PPO.warmup_steps)
    assert min(found.clipped) > 0, "both bounds must act"
    assert min(found.norms) < RECIPE.clip_grad < max(found.norms), "clipping must act, not always"
    assert [r["optimizer/grad_norm"] for r in trained] == pytest.approx(
        means_of_pairs(found.norms), rel=1e-3
    )
    assert [r["loss/kl"] for r in trained] == pytest.approx(found.kl, rel=1e-3)
    assert max(abs(r["policy/kl_beta"] / RECIPE.kl_beta - 1) for r in trained) > 0.03
    assert worst_error(folder, "hf", found.weights, of_change=False) <= 1e-5
    assert worst_error(folder, "hf", found.weights, of_change=True) <= 2e-4


def test_the_critic_is_the_plain_trainers(
    folder: Path, metrics: list[dict[str, float]], plain: tuple[Replayed, dict[int, float]]
) -> None:
    """Its own rate, warm-up and horizon, and its optimizer across the interruption."""
    found, _ = plain
    assert len(found.critic_norms) == 2 * STEPS
    trained = [r for r in metrics if "value/grad_norm" in r]
    assert [r["value/grad_norm"] for r in trained] == pytest.approx(
        means_of_pairs(found.critic_norms), rel=1e-3
    )
    assert max(r["value/clip_fraction"] for r in trained) > 0.01, "the bound must act"
    assert worst_error(folder, "critic", found.critic, of_change=False) <= 1e-5
    assert worst_error(folder, "critic", found.critic, of_change=True) <= 2e-4


def test_evaluations_are_of_the_weights_after_their_step(
    metrics: list[dict[str, float]], plain: tuple[Replayed, dict[int, float]]
) -> None:
    _, rewards = plain
    evaluated = {int(r["step"]): r["eval/reward"] for r in metrics if "eval/reward" in r}
    assert list(evaluated) == [0, 2, 4, 5]
    assert evaluated == pytest.approx({step: rewards[step] for step in evaluated}, rel=1e-6)
    assert len(set(rewards.values())) > 2, "weights that differ must be told apart"


def test_every_prompt_is_taken_once_in_an_epoch(folder: Path) -> None:
    """Across the interruption as well; rows of the resumed run repeat what was sampled before."""
    after = (folder / "out" / "rollouts.jsonl").read_text()
    before = (folder / "before.jsonl").read_text()
    assert after.startswith(before) and len(before.splitlines()) >= 3 * PROMPTS * GROUP
    prompts = Counter(json.loads(line)["prompt"] for line in after.splitlines())
    assert set(prompts.values()) == {GROUP} and len(prompts) == STEPS * PROMPTS


def test_the_last_step_is_saved(folder: Path) -> None:
    """It is not a multiple of the interval."""
    saved = {path.name for path in (folder / "out" / "save").glob("iter_*[0-9]")}
    assert f"iter_{STEPS:07d}" in saved and f"iter_{STEPS - 2:07d}" not in saved
    state = json.loads((folder / f"out/save/iter_{STEPS:07d}/checkpoint.json").read_text())
    assert state["extra"]["version"] == 2 * (STEPS - PPO.warmup_steps)
