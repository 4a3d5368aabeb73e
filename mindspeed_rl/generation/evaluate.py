"""Evaluates the policy on held-out prompts, greedy and sampled, by the rewards of the run."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from mindspeed_rl.algorithms.pass_at_k import pass_at_k, reported_k
from mindspeed_rl.colocation.scheduler import DeviceScheduler, Phase
from mindspeed_rl.config import PromptConfig
from mindspeed_rl.core.graph_sizes import decode_batches
from mindspeed_rl.core.types import Rollout
from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.generation.rollout_worker import (
    GenerationResult,
    PassRequest,
    RolloutWorker,
    SidePass,
)
from mindspeed_rl.generation.scoring import RewardFunctions
from mindspeed_rl.metrics import names
from mindspeed_rl.metrics.metric_set import MetricSet, reduce_metrics
from mindspeed_rl.rewards import lenient_match
from mindspeed_rl.rewards.registry import verdicts
from mindspeed_rl.samples.rollout_info import Correctness, RolloutInfo

# Attempt number of evaluations, far above any of training, so that their seeds differ.
_ATTEMPT = 1 << 40


See = Callable[[Sequence[GenerationResult]], None]
"""Looks at the greedy pass of an evaluation, and the sampled one. Collective: the world."""

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
        seconds: Wall time on rank 0; NaN where a step generated other responses with it.
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

    @property
    def text(self) -> str:
        """The result for people to read."""
        sampled = "".join(f", {key} {value:.4g}" for key, value in self.sampled.items())
        return (
            f"reward {self.reward:.4g}, accuracy {self.accuracy:.1%}, lenient "
            f"{self.accuracy_lenient:.1%} on {self.num_prompts} held-out prompts{sampled}"
        )

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
        if math.isnan(self.seconds):
            del values["eval/time_s"]
        return {names.of_set(key, name): value for key, value in values.items()}


def evaluate(
    worker: RolloutWorker,
    scheduler: DeviceScheduler,
    flags: PromptConfig,
    dataset: PromptDataset,
    see: See | None = None,
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
        see: Called with the results of the passes.
        step: Number of the step after which the evaluation comes; it seeds the samples.
        version: Version of the weights.
    """
    scheduler.require(Phase.ROLLOUT, "evaluate")
    start = time.perf_counter()
    found = _run_alone(worker, _passes(worker, flags, dataset, step, version))
    seconds = time.perf_counter() - start
    if see is not None:
        see(found)
    return _evaluation(flags, found, seconds)


class SharedEvaluation:
    """An evaluation whose responses are generated together with those of a step.

    Its requests take places of the engine that stay empty otherwise, above all while the last
    responses of a step are generated. The responses are those of :func:`evaluate`.

    Args:
        worker: Worker that generates and scores the responses.
        flags: Flags of the evaluation.
        sets: Sets of held-out prompts by name.
        step: Number of the step after which the evaluation comes; it seeds the samples.
        version: Version of the weights.
        limit_s: Limit of the phases in which it is generated, in seconds.

    Attributes:
        step: The same.
        limit_s: The same.
        steps: Steps of the slowest engine, by the lengths of responses and without drafts: those
            that the passes of the evaluation take alone, and those that they added; ``None`` while
            nothing is generated, and where the step had no responses to generate.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        flags: PromptConfig,
        sets: Mapping[str, PromptDataset],
        *,
        step: int,
        version: int,
        limit_s: float,
    ) -> None:
        self.step, self.limit_s = step, limit_s
        self.steps: tuple[int, int] | None = None
        self._worker, self._flags = worker, flags
        self._passes = {
            name: _passes(worker, flags, dataset, step, version) for name, dataset in sets.items()
        }
        self._found: list[GenerationResult] = []

    def take(self) -> list[SidePass]:
        """Return all passes, or none after :meth:`note`."""
        return [] if self._found else [p for found in self._passes.values() for p in found]

    def note(self, found: GenerationResult) -> None:
        """Note the results of what :meth:`take` returned, and of the pass beside it. Local."""
        if not found.beside:
            return
        self._found = list(found.beside)
        capacity = self._worker.engine.max_num_seqs
        others = [result.samples for result in found.beside]
        alone = sum(engine_steps(samples, capacity) for samples in others)
        together = engine_steps([s for part in (found.samples, *others) for s in part], capacity)
        self.steps = alone, together - engine_steps(found.samples, capacity)

    def metrics(self) -> dict[str, float]:
        """Return the steps by metric name; none where they are not known. Local."""
        if self.steps is None:
            return {}
        alone, added = self.steps
        return {"eval/steps_alone": float(alone), "eval/steps_added": float(added)}

    def results(
        self, see: Callable[[str, Sequence[GenerationResult]], None] | None = None
    ) -> dict[str, Evaluation]:
        """Return the result on each set by its name.

        Collective where the step had no responses to generate: the world; within ROLLOUT.

        Args:
            see: Called with the name of each set and the results of its passes.
        """
        found = iter(self._found or _run_alone(self._worker, self.take()))
        of_set = {name: [next(found) for _ in passes] for name, passes in self._passes.items()}
        if see is not None:
            for name, results in of_set.items():
                see(name, results)
        return {name: _evaluation(self._flags, results) for name, results in of_set.items()}


def engine_steps(samples: Sequence[RolloutInfo], capacity: int) -> int:
    """Return the steps in which the slowest engine generates samples without drafts. Pure.

    Args:
        samples: Samples in the order of their start.
        capacity: Responses that an engine runs at once.
    """
    lengths: dict[int, list[int]] = defaultdict(list)
    for sample in samples:
        lengths[sample.group].append(sample.num_tokens + 1)  # the first token takes a step, too
    return max((decode_batches(found, capacity).total() for found in lengths.values()), default=0)


def _run_alone(worker: RolloutWorker, passes: Sequence[SidePass]) -> list[GenerationResult]:
    return [worker.run(p.request, lambda _: nullcontext(), p.compare) for p in passes]


def _passes(
    worker: RolloutWorker, flags: PromptConfig, dataset: PromptDataset, step: int, version: int
) -> list[SidePass]:
    """Return the greedy pass over the prompts of a set, and the sampled one if there is one."""
    limit = flags.rl_prompts_per_eval or len(dataset)
    prompts = dataset[: min(limit, len(dataset))]
    wanted = [(list(prompts), 0.0)]
    if flags.rl_eval_samples:
        several = [p for p in prompts for _ in range(flags.rl_eval_samples)]
        wanted.append((several, flags.rl_eval_temperature))
    compare = partial(correctness_of, worker.rewards)
    return [
        SidePass(PassRequest(p, step, worker.settings(t), version, attempt=_ATTEMPT), compare)
        for p, t in wanted
    ]


def _evaluation(
    flags: PromptConfig, found: Sequence[GenerationResult], seconds: float = math.nan
) -> Evaluation:
    """Return the result of the greedy pass and the sampled one."""
    samples = found[0].samples
    sampled = found[1].samples if len(found) > 1 else []
    scoring = MetricSet()
    for result in found:
        scoring = scoring.merge({name: result.metrics[name] for name in _FAILED})
    failed = reduce_metrics(scoring)
    rewards = [s.reward for s in samples if not math.isnan(s.reward)]
    return Evaluation(
        accuracy=sum(s.correctness.exact for s in samples) / len(samples),
        accuracy_lenient=sum(s.correctness.lenient for s in samples) / len(samples),
        num_prompts=len(samples),
        reward=_mean(rewards),
        num_unscored=len(samples) - len(rewards),
        seconds=seconds,
        num_samples=flags.rl_eval_samples,
        sampled=sampled_metrics(sampled, flags.rl_eval_samples),
        error_rate=failed[_FAILED[0]],
        timeout_rate=failed[_FAILED[1]],
    )


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
