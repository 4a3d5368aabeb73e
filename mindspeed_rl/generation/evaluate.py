"""Evaluates the policy on held-out prompts, greedy and sampled, by the rewards of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from mindspeed_rl.algorithms.pass_at_k import pass_at_k, reported_k
from mindspeed_rl.colocation.scheduler import DeviceScheduler, Phase
from mindspeed_rl.config import PromptConfig
from mindspeed_rl.core.types import Prompt, Rollout
from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.generation.rollout_worker import PassRequest, RolloutWorker
from mindspeed_rl.generation.scoring import RewardFunctions
from mindspeed_rl.metrics import names
from mindspeed_rl.metrics.metric_set import MetricSet, reduce_metrics
from mindspeed_rl.rewards import lenient_match
from mindspeed_rl.rewards.registry import verdicts
from mindspeed_rl.samples.rollout_info import Correctness, RolloutInfo

# Attempt number of evaluations, far above any of training, so that their seeds differ.
_ATTEMPT = 1 << 40


_FAILED = ("reward/error_rate", "reward/timeout_rate")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation on the prompts of a set.

    Attributes:
        accuracy: Part of the greedy responses that end by themselves and equal the answer to the
            letter.
        accuracy_lenient: Part of the greedy responses that is right (:func:`is_right`).
        num_prompts: Number of evaluated prompts.
        reward: Mean reward of the greedy responses that were scored; NaN when none was.
        num_unscored: Number of greedy responses whose rewards abstained or failed.
        seconds: Wall time on rank 0.
        num_samples: Number of sampled responses per prompt.
        sampled: ``mean@n`` and ``pass@k`` of the sampled responses, and their mean reward, by name.
        error_rate: Part of all rewards that raised.
        timeout_rate: Part of all rewards that hit their time limit and got its score.
    """

    accuracy: float
    accuracy_lenient: float
    num_prompts: int
    reward: float = math.nan
    num_unscored: int = 0
    seconds: float = 0.0
    num_samples: int = 0
    sampled: Mapping[str, float] = field(default_factory=dict)
    error_rate: float = 0.0
    timeout_rate: float = 0.0

    def metrics(self, name: str = "") -> dict[str, float]:
        """Return the result by metric name; ``name`` is that of the set, if it has one."""
        values = {
            names.EVAL_REWARD: self.reward,
            names.ACCURACY: self.accuracy,
            names.ACCURACY_LENIENT: self.accuracy_lenient,
            "eval/num_prompts": float(self.num_prompts),
            "eval/num_unscored": float(self.num_unscored),
            "eval/error_rate": self.error_rate,
            "eval/timeout_rate": self.timeout_rate,
            "eval/time_s": self.seconds,
            **{f"eval/{key}": value for key, value in self.sampled.items()},
        }
        return {names.of_set(key, name): value for key, value in values.items()}


def evaluate(
    worker: RolloutWorker,
    scheduler: DeviceScheduler,
    flags: PromptConfig,
    dataset: PromptDataset,
    *,
    step: int,
    version: int,
) -> Evaluation:
    """Answer and score every prompt of a set. Collective: the world; within ROLLOUT.

    It answers once greedily, and ``--rl-eval-samples`` times at ``--rl-eval-temperature``.

    Args:
        worker: Worker that generates and scores the responses.
        scheduler: Scheduler that knows the present phase.
        flags: Flags of the evaluation.
        dataset: Set of held-out prompts.
        step: Number of the step after which the evaluation comes; it seeds the samples.
        version: Version of the weights.
    """
    scheduler.require(Phase.ROLLOUT, "evaluate")
    limit = flags.rl_prompts_per_eval or len(dataset)
    prompts = dataset[: min(limit, len(dataset))]
    start = time.perf_counter()
    samples, found = _answers(worker, prompts, step, 0.0, version)
    several = [p for p in prompts for _ in range(flags.rl_eval_samples)]
    sampled: list[RolloutInfo] = []
    if several:
        sampled, more = _answers(worker, several, step, flags.rl_eval_temperature, version)
        found = found.merge(more)
    failed = reduce_metrics(MetricSet({name: found[name] for name in _FAILED}))
    rewards = [s.reward for s in samples if not math.isnan(s.reward)]
    return Evaluation(
        accuracy=sum(s.correctness.exact for s in samples) / len(samples),
        accuracy_lenient=sum(s.correctness.lenient for s in samples) / len(samples),
        num_prompts=len(samples),
        reward=_mean(rewards),
        num_unscored=len(samples) - len(rewards),
        seconds=time.perf_counter() - start,
        num_samples=flags.rl_eval_samples,
        sampled=sampled_metrics(sampled, flags.rl_eval_samples),
        error_rate=failed[_FAILED[0]],
        timeout_rate=failed[_FAILED[1]],
    )


def _answers(
    worker: RolloutWorker, prompts: Sequence[Prompt], step: int, temperature: float, version: int
) -> tuple[list[RolloutInfo], MetricSet]:
    settings = worker.settings(temperature)
    request = PassRequest(prompts, step, settings, version, attempt=_ATTEMPT)
    found = worker.run(request, lambda _: nullcontext(), partial(correctness_of, worker.rewards))
    return found.samples, found.metrics


def correctness_of(rewards: RewardFunctions, rollout: Rollout) -> Correctness:
    """Return whether a response is the answer to the letter, and whether it is right. Local."""
    completion, answer = rollout.completion, rollout.prompt.answer
    text = rewards.response_text(completion)
    exact = not completion.truncated and text.strip() == answer.strip()
    return Correctness(float(exact), float(is_right(rollout.reward_parts, text, answer)))


def sampled_metrics(samples: Sequence[RolloutInfo], per_prompt: int) -> dict[str, float]:
    """Return ``mean@n``, ``pass@k`` and the mean reward of ``per_prompt`` samples of each prompt.

    Args:
        samples: Samples with their correctness, siblings together.
        per_prompt: Number of samples of a prompt; 0 for no metrics.
    """
    if not per_prompt:
        return {}
    right = [int(s.correctness.lenient) for s in samples]
    counts = [sum(right[i : i + per_prompt]) for i in range(0, len(right), per_prompt)]
    values = {
        f"pass@{k}": _mean([pass_at_k(per_prompt, count, k) for count in counts])
        for k in reported_k(per_prompt)
    }
    values[f"mean@{per_prompt}"] = sum(right) / len(right)
    values["sampled_reward"] = _mean([s.reward for s in samples if not math.isnan(s.reward)])
    return values


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def is_right(parts: Mapping[str, float], text: str, answer: str) -> bool:
    r"""Return whether a response is right, by a verdict reward or else by its last number.

    The first verdict reward that did not abstain decides, and only full marks are right: so
    ``\frac{1}{2}`` is ``0.5`` where the run has the math reward.

    Args:
        parts: Scores of the rewards by name; NaN or absent where one abstained.
        text: Text of the response.
        answer: Reference answer.
    """
    for name in verdicts():
        score = parts.get(name, math.nan)
        if not math.isnan(score):
            return score == 1.0
    return lenient_match(text, answer)
