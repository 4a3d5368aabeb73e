"""Decides which prompts come next: a seeded permutation per epoch that can be resumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mindspeed_rl.core.errors import UsageError

_BY_LENGTH = "by_length"


def epoch_order(num_prompts: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Return the order of an epoch's prompts; a pure function of the arguments."""
    order = list(range(num_prompts))
    if shuffle:
        # Sorting by random() keys: of all of `random`, only the values of random() are promised
        # to stay the same in later Python versions.
        rng = random.Random(f"{seed}/{epoch}")
        keys = [rng.random() for _ in order]
        order.sort(key=keys.__getitem__)
    return order


@dataclass(frozen=True, slots=True)
class LengthRanking:
    """What an epoch's order by length is computed from, besides seed and epoch.

    Attributes:
        lengths: Expected length of the responses to each prompt, in tokens.
        block: Number of prompts in a block: those of a step.
        first: Number of prompts in the first block, which fills the step in which the epoch
            begins; 0: it is a block like the others.
    """

    lengths: tuple[int, ...]
    block: int
    first: int = 0

    def order(self, seed: int, epoch: int) -> list[int]:
        """Return the order of an epoch in which the prompts of a block have similar lengths.

        The prompts sorted by length are cut into blocks. Which block comes when, and the order
        within a block, are drawn from seed and epoch, as is the order of prompts of equal length.
        Every prompt is in it once. The shorter first and last blocks are cut at drawn places, too.
        """
        shuffled = epoch_order(len(self.lengths), seed, epoch, True)
        ranked = sorted(shuffled, key=self.lengths.__getitem__)
        first = min(self.first, len(ranked))
        full, rest = divmod(len(ranked) - first, self.block)
        sizes = [size for size in (first, *([self.block] * full), rest) if size]
        rng = random.Random(f"{seed}/{epoch}/blocks")
        keys = [rng.random() for _ in sizes]
        blocks: dict[int, list[int]] = {}
        start = 0
        for number in sorted(range(len(sizes)), key=keys.__getitem__):
            blocks[number] = ranked[start : start + sizes[number]]
            start += sizes[number]
        place = {prompt: position for position, prompt in enumerate(shuffled)}
        return [
            prompt
            for number in range(len(sizes))
            for prompt in sorted(blocks[number], key=place.__getitem__)
        ]


@dataclass(frozen=True, slots=True)
class ByLength:
    """Orders epochs by the lengths that are expected when they begin.

    Attributes:
        block: Number of prompts that a step draws.
        expected: Returns the expected length of every prompt, equal on all ranks; empty while
            nothing is known.
    """

    block: int
    expected: Callable[[], Sequence[int]]


class PromptSampler:
    """Deals out prompt indices, every one exactly once per epoch.

    The order of an epoch depends on ``seed`` and the epoch number only: not on how many indices
    are taken at a time, not on the global random state, not on the Python version. With
    ``by_length`` it depends also on the lengths that were expected when the epoch began and on
    where in a request it began; both are in the state. A request may cross the end of an epoch, so
    nothing is dropped there; one request then can hold an index twice, once from each epoch.

    Args:
        num_prompts: Size of the data set.
        seed: Seed of the order.
        shuffle: Whether to permute every epoch; otherwise file order.
        fingerprint: ``PromptDataset.fingerprint``, kept in the state so that a resumed run
            cannot continue on other data unnoticed.
        by_length: Orders every epoch that begins when lengths are known; ``None``: no epoch.
    """

    def __init__(
        self,
        num_prompts: int,
        seed: int,
        shuffle: bool = True,
        *,
        fingerprint: str = "",
        by_length: ByLength | None = None,
    ) -> None:
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self.fingerprint = fingerprint
        self._by_length = by_length
        self._epoch = self._position = 0
        self._order = epoch_order(num_prompts, seed, 0, shuffle)
        self._ranked_by: LengthRanking | None = None

    def next(self, count: int) -> list[int]:
        """Return the next ``count`` indices into the data set."""
        indices: list[int] = []
        while len(indices) < count:
            if self._position == self._num_prompts:
                self._start_epoch(self._epoch + 1, self._ranking(count - len(indices)))
            end = min(self._position + count - len(indices), self._num_prompts)
            indices += self._order[self._position : end]
            self._position = end
        return indices

    @property
    def epochs(self) -> float:
        """How often the data set has been dealt out: 1.5 is half of the second epoch."""
        return self._epoch + self._position / self._num_prompts

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the following indices, in plain JSON types."""
        state = {**self._identity(), "epoch": self._epoch, "position": self._position}
        if self._ranked_by is not None:
            ranking = asdict(self._ranked_by)
            state[_BY_LENGTH] = {**ranking, "lengths": list(self._ranked_by.lengths)}
        return state

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_changed_data: bool = False
    ) -> None:
        """Continue where ``state`` was taken, in the order that the epoch had there.

        Args:
            state: Result of ``state_dict()``.
            allow_changed_data: Whether to accept a state of another data set, seed or order. The
                sampler then starts the epoch after the saved one instead of continuing it.

        Raises:
            UsageError: the state is of another data set, seed or order and that is not allowed,
                or it is not a state of this class.
        """
        expected = {*self._identity(), "epoch", "position"}
        if set(state) - {_BY_LENGTH} != expected:
            raise UsageError(
                f"sampler state has the keys {sorted(state)}, expected {sorted(expected)}; "
                "it was not written by this version of PromptSampler"
            )
        changed = [
            f"{key} (saved {state[key]!r}, now {value!r})"
            for key, value in self._identity().items()
            if state[key] != value
        ]
        if changed and not allow_changed_data:
            raise UsageError(
                f"the checkpoint's sampler belongs to another run: changed are "
                f"{', '.join(changed)}. Resume with the data, tokenizer and seed of the "
                "checkpoint, or add --allow-changed-data to start a new epoch on the present data"
            )
        if changed:
            self._start_epoch(state["epoch"] + 1, self._ranking(0))
            return
        ranking = None
        if saved := state.get(_BY_LENGTH):
            ranking = LengthRanking(tuple(saved["lengths"]), saved["block"], saved["first"])
        self._start_epoch(state["epoch"], ranking, state["position"])

    def _identity(self) -> dict[str, Any]:
        return {
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self.fingerprint,
        }

    def _ranking(self, needed: int) -> LengthRanking | None:
        """Return what to order a new epoch by; its first prompts are the ``needed`` of a step."""
        if self._by_length is None or not (lengths := self._by_length.expected()):
            return None
        block = self._by_length.block
        return LengthRanking(tuple(lengths), block, needed % block)

    def _start_epoch(self, epoch: int, ranking: LengthRanking | None, position: int = 0) -> None:
        self._epoch = epoch
        self._position = position
        self._ranked_by = ranking
        if ranking is None:
            self._order = epoch_order(self._num_prompts, self._seed, epoch, self._shuffle)
        else:
            self._order = ranking.order(self._seed, epoch)
