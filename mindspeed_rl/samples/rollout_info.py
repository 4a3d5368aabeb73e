"""The sample table: what every rank knows of every sample of a step, except its tokens.

Advantages, filters and placement are computed from it on every rank without more communication. The
tokens stay in the :class:`~mindspeed_rl.samples.device_cache.TensorCache` of the ranks that made
them until a plan moves them. Prompt tokens never travel: every rank has the data.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from mindspeed_rl.core.types import Rollout
from mindspeed_rl.parallel.small_collectives import all_reduce_sum
from mindspeed_rl.samples.columns import Column

# prompt index, tokens, sampled tokens, stopped, weights version, group of ranks, whether it has
# early log-probs, times seen, checksum, sum of the checksums of all copies
_INTEGERS = 10
_SEEN, _CHECKSUM, _COPIES = 7, 8, 9


class SampleKey(NamedTuple):
    """The identity of a sample during its whole life. As a tuple it has a fast hash.

    Attributes:
        step: Step that sampled it.
        number: Number that is unique among all samples of the step.
    """

    step: int
    number: int


#: Key of samples that no cache keeps, such as those of an evaluation.
UNCACHED = SampleKey(-1, 0)


class Correctness(NamedTuple):
    """Whether a response of an evaluation is right, by a strict and a lenient rule.

    Attributes:
        exact: 1 when it ended by itself and equals the answer to the letter, else 0.
        lenient: 1 when it is right by a verdict reward or else by its last number, else 0.
    """

    exact: float
    lenient: float


#: Correctness of a sample that no evaluation compared with the answer.
NOT_COMPARED = Correctness(math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class RolloutInfo:
    """A finished sample as every rank knows it.

    Attributes:
        sample_id: Position in the step, equal on all ranks.
        prompt_index: Row of the data set.
        num_tokens: Number of tokens of the response.
        num_sampled: Number of those that the model sampled; an environment wrote the others.
        stopped: Whether a stop token ended the response, and not the limit.
        weights_version: Version of the weights that sampled it.
        group: Engine ranks that have its tokens: see ``EngineLayout.group_of``.
        reward: Reward; NaN when the reward abstained.
        parts: Scores of the single reward functions, NaN where one abstained.
        correctness: In an evaluation, whether the response is right.
        key: Key under which the ranks of its group keep its tokens.
        earlier_versions: (version, tokens) of what earlier passes of generation sampled, from the
            start of the response; the rest is of ``weights_version``.
        has_early: Whether the passes that run during rollouts have computed its log-probs, which
            are then among its columns.
    """

    sample_id: int
    prompt_index: int
    num_tokens: int
    num_sampled: int
    stopped: bool
    weights_version: int
    group: int
    reward: float
    parts: tuple[float, ...] = ()
    correctness: Correctness = NOT_COMPARED
    key: SampleKey = UNCACHED
    earlier_versions: tuple[tuple[int, int], ...] = ()
    has_early: bool = False

    def is_incomplete(self, limit: int) -> bool:
        """Tell whether the response neither stopped nor reached the limit of responses."""
        return not self.stopped and self.num_tokens < limit

    def num_stale(self, version: int) -> int:
        """Count tokens at the start of the response that other weights than ``version`` sampled."""
        if self.weights_version != version:
            return self.num_tokens
        return sum(tokens for sampled_by, tokens in self.earlier_versions if sampled_by != version)

    @property
    def versions(self) -> list[int]:
        """The version of the weights that sampled each token."""
        earlier = [version for version, tokens in self.earlier_versions for _ in range(tokens)]
        return earlier + [self.weights_version] * (self.num_tokens - len(earlier))

    def grown_from(self, before: RolloutInfo | None) -> RolloutInfo:
        """Add the versions of the sample as it was before its last pass of generation."""
        if before is None:
            return self
        known = sum(tokens for _, tokens in before.earlier_versions)
        span = (before.weights_version, before.num_tokens - known)
        return replace(self, earlier_versions=(*before.earlier_versions, span))


def exchange_table(
    rollouts: Sequence[Rollout],
    group: int,
    part_names: Sequence[str],
    num_samples: int,
    key_of: SampleKey,
    correctness: Mapping[int, Correctness] | None = None,
    *,
    columns: Sequence[Column],
    copies: Sequence[Rollout] = (),
    num_copies: int = 1,
) -> list[RolloutInfo]:
    """Build the table of all samples on every rank, by sample id. Collective: the world.

    It is one sum over ranks of a table on the host, 8 bytes for each number of a sample, to which
    each rank adds the rows that it knows.

    Args:
        rollouts: Rollouts of this rank's engine, on the one rank that reports for the engine.
        group: Group of this rank.
        part_names: Names of the reward functions, equal on all ranks.
        num_samples: Number of samples that there must be in all.
        key_of: Key of sample 0; the numbers of the others follow it.
        correctness: Correctness of each of ``rollouts``, by sample id; ``None`` on all ranks or
            on none.
        columns: Columns that a run keeps for every token; copies must agree in them.
        copies: The same rollouts, on the other ranks of the engine.
        num_copies: Number of ranks of an engine that have each sample.

    Raises:
        RuntimeError: A sample is missing or there twice, or the ranks of an engine have different
            tokens or columns for it.
    """
    width = _INTEGERS + 1 + len(part_names)
    if correctness is not None:
        width += len(NOT_COMPARED)
    rows = torch.zeros(num_samples + 1, width, dtype=torch.int64)
    if rollouts:
        scores = [
            [*_scores(r, part_names), *(correctness[r.sample_id] if correctness else ())]
            for r in rollouts
        ]
        bits = torch.tensor(scores, dtype=torch.float32).view(torch.int32)
        mine = torch.cat([torch.tensor([_facts(r, group, columns) for r in rollouts]), bits], dim=1)
        # Invalid ids are counted in a row of their own, for the error message.
        ids = [r.sample_id if 0 <= r.sample_id < num_samples else num_samples for r in rollouts]
        rows.index_add_(0, torch.tensor(ids), mine)
    if copies:
        sums = torch.tensor([_checksum(r, columns) for r in copies])
        rows[:, _COPIES].index_add_(0, torch.tensor([r.sample_id for r in copies]), sums)
    rows = all_reduce_sum(rows)
    _check_table(rows, num_samples, num_copies)
    return _samples_of(rows, key_of, len(part_names))


def _check_table(rows: torch.Tensor, num_samples: int, num_copies: int) -> None:
    """Check sums over ranks, [num_samples + 1, numbers] int64: all samples once, copies equal."""
    seen = rows[:, _SEEN].tolist()
    if seen != [1] * num_samples + [0]:
        missing = [i for i, times in enumerate(seen[:-1]) if not times]
        raise RuntimeError(
            f"rollouts of this step: {sum(seen)} arrived, {num_samples} expected; missing {missing}"
        )
    differing = (rows[:, _CHECKSUM] * num_copies != rows[:, _COPIES]).nonzero().flatten().tolist()
    if differing:
        group = int(rows[differing[0], 5])
        raise RuntimeError(
            f"samples {differing[:8]}: the {num_copies} ranks of engine {group} have different "
            "tokens or columns for them, so tensor-parallel ranks would train on different data; "
            "the engine's sampler is not deterministic across its ranks"
        )


def _samples_of(rows: torch.Tensor, key_of: SampleKey, num_parts: int) -> list[RolloutInfo]:
    """Convert the rows of a checked table to samples. Local."""
    floats = rows[:-1, _INTEGERS:].to(torch.int32).view(torch.float32).tolist()
    end = 1 + num_parts
    return [
        RolloutInfo(
            sample_id=i,
            prompt_index=facts[0],
            num_tokens=facts[1],
            num_sampled=facts[2],
            stopped=bool(facts[3]),
            weights_version=facts[4],
            group=facts[5],
            has_early=bool(facts[6]),
            reward=numbers[0],
            parts=tuple(numbers[1:end]),
            correctness=Correctness(*numbers[end:]) if numbers[end:] else NOT_COMPARED,
            key=SampleKey(key_of.step, key_of.number + i),
        )
        for i, (facts, numbers) in enumerate(zip(rows[:-1].tolist(), floats, strict=True))
    ]


def _facts(rollout: Rollout, group: int, columns: Sequence[Column]) -> list[int]:
    done, checksum = rollout.completion, _checksum(rollout, columns)
    return [
        rollout.prompt.index,
        len(done.token_ids),
        len(done.sampled_ids),
        int(not done.truncated),
        done.weights_version,
        group,
        int(done.early is not None),
        1,
        checksum,
        checksum,
    ]


def _checksum(rollout: Rollout, columns: Sequence[Column]) -> int:
    """Checksum the bits of every column as it is kept; 32 bits, so that sums stay exact."""
    found = 0
    for column in columns:
        found = zlib.crc32(column.gather([rollout.completion]).numpy().tobytes(), found)
    return found


def _scores(rollout: Rollout, part_names: Sequence[str]) -> list[float]:
    nan = float("nan")
    reward = nan if rollout.reward is None else rollout.reward
    return [reward, *(rollout.reward_parts.get(name, nan) for name in part_names)]
