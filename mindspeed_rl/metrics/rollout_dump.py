"""Dumps a few rollouts of every step as text, for people to read the policy's responses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from mindspeed_rl.metrics.jsonl import JsonlWriter

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One sample in the form in which it is dumped.

    Attributes:
        sample_id: Id as in ``Rollout``, equal on all ranks and in all layouts.
        answer: Reference answer.
        reward: Total reward; ``None`` when the reward function abstained.
        parts: Score of each reward function, by name.
        finish_reason: ``"stop"`` or ``"length"``.
        prompt_ids: Tokens of the prompt; these four only with ``--log-rollout-tokens``.
        response_ids: Tokens of the response.
        logprobs: Log-probs of the response under the engine, in nats.
        versions: Weights version that sampled each token, where versions differ.
    """

    sample_id: int
    prompt: str
    response: str
    answer: str
    reward: float | None
    finish_reason: str
    parts: Mapping[str, float] = field(default_factory=dict)
    prompt_ids: Sequence[int] | None = None
    response_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    versions: Sequence[int] | None = None


class RolloutDump:
    """Appends sampled rollouts to a JSON-lines file, one object per sample.

    Args:
        path: Path of the file, which is created at the first write.
        num_per_step: Rows kept of each step, spread evenly over the sample ids so that they come
            from different prompts; 0 keeps none.
        is_writer: Whether this rank writes; on the others every call does nothing.
    """

    def __init__(self, path: str | os.PathLike[str], num_per_step: int, is_writer: bool) -> None:
        self._num_per_step = num_per_step
        self._writer = JsonlWriter(path) if is_writer else None

    def write(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Write a selection of one step's rows."""
        if self._writer is None:
            return
        for row in evenly_spread(sorted(rows, key=lambda row: row.sample_id), self._num_per_step):
            fields = {name: value for name, value in asdict(row).items() if value is not None}
            self._writer.append(step, {"reward": None} | fields)

    def truncate_after(self, step: int) -> None:
        """Drop the rows of later steps, which a resumed run writes again."""
        if self._writer is not None:
            self._writer.truncate_after(step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def evenly_spread(rows: Sequence[T], num: int) -> list[T]:
    """Return ``num`` rows at even distances, with the first one; all rows when there are fewer."""
    num = min(num, len(rows))
    return [rows[index * len(rows) // num] for index in range(num)]
