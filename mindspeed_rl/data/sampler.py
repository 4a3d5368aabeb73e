"""Decides which prompts come next: a seeded permutation per epoch that can be resumed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from mindspeed_rl.core.errors import UsageError


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


class PromptSampler:
    """Deals out prompt indices, every one exactly once per epoch.

    The order of an epoch depends on ``seed`` and the epoch number only: not on how many indices
    are taken at a time, not on the global random state, not on the Python version. A request may
    cross the end of an epoch, so nothing is dropped there; one request then can hold an index
    twice, once from each epoch.

    Args:
        num_prompts: Size of the data set.
        seed: Seed of the order.
        shuffle: Whether to permute every epoch; otherwise file order.
        fingerprint: ``PromptDataset.fingerprint``, kept in the state so that a resumed run
            cannot continue on other data unnoticed.
    """

    def __init__(
        self, num_prompts: int, seed: int, shuffle: bool = True, *, fingerprint: str = ""
    ) -> None:
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self.fingerprint = fingerprint
        self._epoch = 0
        self._position = 0
        self._order = epoch_order(num_prompts, seed, 0, shuffle)

    def next(self, count: int) -> list[int]:
        """Return the next ``count`` indices into the data set."""
        indices: list[int] = []
        while len(indices) < count:
            if self._position == self._num_prompts:
                self._start_epoch(self._epoch + 1)
            end = min(self._position + count - len(indices), self._num_prompts)
            indices += self._order[self._position : end]
            self._position = end
        return indices

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the following indices, in plain JSON types."""
        return {**self._identity(), "epoch": self._epoch, "position": self._position}

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_changed_data: bool = False
    ) -> None:
        """Continue where ``state`` was taken.

        Args:
            state: Result of ``state_dict()``.
            allow_changed_data: Whether to accept a state of another data set, seed or order. The
                sampler then starts the epoch after the saved one instead of continuing it.

        Raises:
            UsageError: the state is of another data set, seed or order and that is not allowed,
                or it is not a state of this class.
        """
        expected = {*self._identity(), "epoch", "position"}
        if set(state) != expected:
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
            self._start_epoch(state["epoch"] + 1)
            return
        self._start_epoch(state["epoch"], state["position"])

    def _identity(self) -> dict[str, Any]:
        return {
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self.fingerprint,
        }

    def _start_epoch(self, epoch: int, position: int = 0) -> None:
        self._epoch = epoch
        self._position = position
        self._order = epoch_order(self._num_prompts, self._seed, epoch, self._shuffle)
