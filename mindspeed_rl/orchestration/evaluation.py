"""Greedy evaluation on held-out prompts, scored by the rewards of the run."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass

from mindspeed_rl.experience.exchange import Sample
from mindspeed_rl.observability import names
from mindspeed_rl.orchestration.rl_job import RLJob
from mindspeed_rl.orchestration.rl_rollout import rollouts_of
from mindspeed_rl.rewards import lenient_match

# The reward whose verdict on the final answer is taken over.
MATH_REWARD = "math"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result on all held-out prompts.

    Attributes:
        accuracy: share of responses that end by themselves and equal the answer to the letter.
        accuracy_lenient: share whose final answer is right, whatever surrounds it: by the math
            reward where the run has it, else the last number of the response.
        num_prompts: how many were evaluated: all that were asked for (R58).
        reward: mean reward of the responses that were scored; NaN when none was.
        num_unscored: responses whose rewards abstained or failed (R43).
        seconds: wall time on rank 0.
    """

    accuracy: float
    accuracy_lenient: float
    num_prompts: int
    reward: float = math.nan
    num_unscored: int = 0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """By metric name."""
        return {
            names.EVAL_REWARD: self.reward,
            names.ACCURACY: self.accuracy,
            names.ACCURACY_LENIENT: self.accuracy_lenient,
            "eval/num_prompts": float(self.num_prompts),
            "eval/num_unscored": float(self.num_unscored),
            "eval/time_s": self.seconds,
        }


def evaluate(run: RLJob, step: int) -> Evaluation:
    """Answer every held-out prompt greedily and score it. Collective: the world; within ROLLOUT.

    Its time belongs to no training step.
    """
    assert run.eval_prompts is not None, "evaluation needs --eval-prompt-data"
    limit = run.config.prompts.rl_prompts_per_eval or len(run.eval_prompts)
    prompts = run.eval_prompts[: min(limit, len(run.eval_prompts))]
    start = time.perf_counter()
    with run.timer.excluded(), run.job.watchdog.phase("evaluate"):
        samples, _ = rollouts_of(
            run, prompts, step, run.sampling(temperature=0.0), phase=lambda _: nullcontext()
        )
    rewards = [s.reward for s in samples if not math.isnan(s.reward)]
    strict = lenient = 0
    for sample in samples:
        answer = prompts[sample.sample_id].answer
        text = str(run.tokenizer.decode(sample.sampled.tolist(), skip_special_tokens=True))
        strict += sample.stopped and text.strip() == answer.strip()
        lenient += is_right(sample, run.reward_names, text, answer)
    return Evaluation(
        accuracy=strict / len(samples),
        accuracy_lenient=lenient / len(samples),
        num_prompts=len(samples),
        reward=math.fsum(rewards) / len(rewards) if rewards else math.nan,
        num_unscored=len(samples) - len(rewards),
        seconds=time.perf_counter() - start,
    )


def is_right(sample: Sample, reward_names: tuple[str, ...], text: str, answer: str) -> bool:
    r"""Whether the final answer of a response is right: ``\frac{1}{2}`` is ``0.5`` where the run
    has the math reward, whose verdict it then is.
    """
    if MATH_REWARD in reward_names:
        return sample.parts[reward_names.index(MATH_REWARD)] == 1.0
    return lenient_match(text, answer)
