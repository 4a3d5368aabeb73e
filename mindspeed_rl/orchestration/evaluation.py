"""Greedy evaluation on held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.experience.exchange import exchange_rollouts
from mindspeed_rl.orchestration.rl_job import RLJob
from mindspeed_rl.orchestration.rl_step import generate
from mindspeed_rl.rewards import lenient_match


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result on all held-out prompts.

    Attributes:
        accuracy: share of responses that end by themselves and equal the answer to the letter.
        accuracy_lenient: share whose last number equals the answer, whatever surrounds it.
        num_prompts: how many were evaluated: all that were asked for (R58).
    """

    accuracy: float
    accuracy_lenient: float
    num_prompts: int

    def metrics(self) -> dict[str, float]:
        """By metric name."""
        return {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_lenient": self.accuracy_lenient,
            "eval/num_prompts": float(self.num_prompts),
        }


def evaluate(run: RLJob, step: int) -> Evaluation:
    """Answer every held-out prompt greedily. Collective: the world; within ROLLOUT."""
    assert run.eval_prompts is not None, "evaluation needs --eval-prompt-data"
    limit = run.config.prompts.rl_prompts_per_eval or len(run.eval_prompts)
    prompts = run.eval_prompts[: min(limit, len(run.eval_prompts))]
    with run.phase("evaluate"):
        rollouts = generate(run, prompts, step, run.sampling(temperature=0.0))
        samples = exchange_rollouts(rollouts if run.leads_engine else [], (), len(prompts))
    strict = lenient = 0
    for sample in samples:
        answer = prompts[sample.sample_id].answer
        text = str(run.tokenizer.decode(sample.response.tolist(), skip_special_tokens=True))
        strict += sample.stopped and text.strip() == answer.strip()
        lenient += lenient_match(text, answer)
    return Evaluation(strict / len(samples), lenient / len(samples), len(samples))
