"""A few rollouts of every step as text, for people to read what the policy really says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from mindspeed_rl.metrics.jsonl import JsonlWriter

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One sample as a person reads it.

    Attributes:
        sample_id: as in ``Rollout``: equal on all ranks and in all layouts.
        answer: the reference answer.
        reward: the total reward; ``None`` when the reward function abstained.
        parts: each reward function's own score.
        finish_reason: ``"stop"`` or ``"length"``.
        prompt_ids: tokens of the prompt; these four only with ``--log-rollout-tokens``.
        response_ids: tokens of the response.
        logprobs: the engine's, of the response, in nats.
        versions: of the weights that sampled each token, where they differ.
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
        path: the file; made at the first write.
        num_per_step: rows kept of each step, spread evenly over the sample ids so that they come
            from different prompts; 0 keeps none.
        is_writer: whether this rank writes; on the others every call does nothing.
    """

    def __init__(self, path: str | os.PathLike[str], num_per_step: int, is_writer: bool) -> None:
        self._num_per_step = num_per_step
        self._writer = JsonlWriter(path) if is_writer else None

    def write(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Writes the sample of one step's rows."""
        if self._writer is None:
            return
        for row in evenly_spread(sorted(rows, key=lambda row: row.sample_id), self._num_per_step):
            fields = {name: value for name, value in asdict(row).items() if value is not None}
            self._writer.append(step, {"reward": None} | fields)

    def truncate_after(self, step: int) -> None:
        """Drops the rows of later steps: a resumed run writes them again."""
        if self._writer is not None:
            self._writer.truncate_after(step)

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


def evenly_spread(rows: Sequence[T], num: int) -> list[T]:
    """``num`` of the rows at even distances, the first one included; all rows when fewer."""
    num = min(num, len(rows))
    return [rows[index * len(rows) // num] for index in range(num)]
