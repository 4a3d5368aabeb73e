"""Scores the samples of a pass, each as soon as it has finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mindspeed_rl.core.types import Completion, Prompt, Rollout
from mindspeed_rl.metrics.metric_set import Mean, MetricSet
from mindspeed_rl.rewards import RewardError, RewardPool, RewardRequest, Scoring
from mindspeed_rl.rewards.builtin.environment import ENVIRONMENT_REWARD, TRANSCRIPT
from mindspeed_rl.rewards.drawn import DrawnRewards, DrawnScoring

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# scored_early is the part that was scored before the last sample was generated; it varies by run.
_METRICS = ("reward/error_rate", "reward/timeout_rate", "throughput/scored_early")


@dataclass(frozen=True)
class RewardFunctions:
    """The reward functions of a run as this rank's engine reaches them.

    Attributes:
        names: Names of the reward functions, equal on all ranks.
        pool: Workers that score; ``None`` on ranks that do not lead an engine.
        tokenizer: Tokenizer of the run.
        in_conversation: Whether rewards also see the environment's part of each sample.
    """

    names: tuple[str, ...]
    pool: RewardPool | DrawnRewards | None
    tokenizer: PreTrainedTokenizerBase
    in_conversation: bool = False

    @contextmanager
    def scorer(self) -> Iterator[Scorer]:
        """Open a scorer for one pass; leaving it with an error drops the requests still open."""
        if self.pool is None:
            yield Scorer(self, None)
            return
        with self.pool.scoring() as scoring:
            yield Scorer(self, scoring)

    def response_text(self, completion: Completion) -> str:
        """Return the model's text without special tokens; for rewards and people only."""
        ids = list(completion.sampled_ids)
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def request(self, rollout: Rollout, environment_reward: float | None = None) -> RewardRequest:
        """Return the request that shows a sample to the reward functions."""
        prompt, completion = rollout.prompt, rollout.completion
        metadata = prompt.metadata
        if self.in_conversation:
            transcript = str(self.tokenizer.decode(list(completion.token_ids)))
            metadata = {
                **metadata, TRANSCRIPT: transcript, ENVIRONMENT_REWARD: environment_reward
            }  # fmt: skip
        return RewardRequest(
            sample_id=rollout.sample_id,
            prompt=prompt.text,
            response=self.response_text(completion),
            answer=prompt.answer,
            finish_reason=completion.finish_reason,
            num_response_tokens=len(completion.sampled_ids),
            metadata=metadata,
        )

    def trial(self, prompts: Sequence[Prompt]) -> tuple[str, ...]:
        """Score prompts with their own answers as responses and return a line for the log. Local.

        A function that fails on every sample is thus told before models are loaded. Does nothing
        where this rank has no workers.

        Raises:
            RewardError: As `RewardPool.score`.
        """
        if not isinstance(self.pool, RewardPool):
            return ()
        try:
            results = self.pool.score([self._trial_request(prompt) for prompt in prompts])
        except RewardError as error:
            raise RewardError(
                f"on prompts of the data, with their own answers as responses, {error}"
            ) from None
        self.pool.forget_rates()
        parts = {
            name: ", ".join(f"{r.parts[name]:g}" if name in r.parts else "none" for r in results)
            for name in self.names
        }
        found = "; ".join(f"{name} {values}" for name, values in parts.items())
        return (f"rewards of the answers of {len(prompts)} prompts: {found}",)

    def _trial_request(self, prompt: Prompt) -> RewardRequest:
        metadata, answer = prompt.metadata, prompt.answer
        if self.in_conversation:
            metadata = {**metadata, TRANSCRIPT: answer, ENVIRONMENT_REWARD: None}
        num_tokens = len(self.tokenizer.encode(answer, add_special_tokens=False)) + 1
        return RewardRequest(
            sample_id=prompt.index,
            prompt=prompt.text,
            response=answer,
            answer=answer,
            finish_reason="stop",
            num_response_tokens=num_tokens,
            metadata=metadata,
        )

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


class Scorer:
    """Collects the samples of one pass of generation and their rewards.

    It scores nothing on ranks that do not lead an engine.
    """

    def __init__(self, functions: RewardFunctions, scoring: Scoring | DrawnScoring | None) -> None:
        self._functions = functions
        self._scoring = scoring
        self._rollouts: list[Rollout] = []
        self._unscored: list[Rollout] = []

    def add(self, rollout: Rollout, environment_reward: float | None = None) -> None:
        """Start to score a finished sample."""
        if self._scoring is not None:
            self._rollouts.append(rollout)
            self._scoring.add(self._functions.request(rollout, environment_reward))

    @property
    def samples(self) -> list[Rollout]:
        """The samples so far, without rewards; none on ranks that do not lead an engine."""
        return [*self._rollouts, *self._unscored]

    def add_unscored(self, rollout: Rollout) -> None:
        """Add a sample that gets no reward."""
        self._unscored.append(rollout)

    def finish(self) -> tuple[list[Rollout], MetricSet]:
        """Wait for all rewards; return the scored samples by sample id, and the error rates."""
        if self._scoring is None:
            return [], MetricSet({name: Mean(0, 0) for name in _METRICS})
        early = self._scoring.num_done
        results = self._scoring.finish()
        scored = [
            replace(rollout, reward=result.reward, reward_parts=result.parts)
            for rollout, result in zip(self._rollouts, results, strict=True)
        ]
        errors, timeouts = (
            Mean.of(float(r.status == status) for r in results) for status in ("error", "timeout")
        )
        metrics = (errors, timeouts, Mean(float(early), float(len(results))))
        everything = sorted([*scored, *self._unscored], key=lambda rollout: rollout.sample_id)
        return everything, MetricSet(dict(zip(_METRICS, metrics, strict=True)))
