"""Prediction of response lengths from the lengths of earlier responses.

Four facts are kept: the mean length of the last step; how the responses of each prompt compare
with the mean of their step, which outlives the drift of lengths in training; the spread of
lengths relative to their prediction; and the longest response to each prompt. All ranks know the
lengths of all samples, so all keep the same history without communication.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from mindspeed_rl.packing.bins import partition

# Weight of the newest step in the relative length of a prompt.
_NEWEST = 0.5
# Number of assumed responses of mean length per new prompt: a few siblings say little.
_PRIOR = 1.0
_DIGITS = 4


@dataclass(slots=True)
class LengthSpread:
    """Ratios of lengths to their predictions, sorted."""

    ratios: list[float] = field(default_factory=list)
    _sums: list[float] = field(default_factory=lambda: [0.0])

    def replace(self, ratios: Sequence[float]) -> None:
        """Replace the ratios by those of a new step."""
        self.ratios, self._sums = sorted(ratios), [0.0]
        for ratio in self.ratios:
            self._sums.append(self._sums[-1] + ratio)

    def mean_beyond(self, ratio: float) -> float | None:
        """Return the mean of the ratios above ``ratio``; ``None`` where there are none."""
        place = bisect_right(self.ratios, ratio)
        above = len(self.ratios) - place
        return (self._sums[-1] - self._sums[place]) / above if above else None


class LengthHistory:
    """Lengths of earlier responses; empty (false) before the first step."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._relative: dict[int, float] = {}
        self._longest: dict[int, int] = {}
        self._known, self._new = LengthSpread(), LengthSpread()

    def __bool__(self) -> bool:
        return self._mean > 0

    def observe(self, lengths: Mapping[int, Sequence[int]]) -> None:
        """Record the finished responses of a step, in tokens, by prompt."""
        count = sum(map(len, lengths.values()))
        if not count:
            return
        self._mean = max(1.0, sum(map(sum, lengths.values())) / count)
        ratios: dict[bool, list[float]] = {True: [], False: []}
        for prompt, found in lengths.items():
            if not found:
                continue
            before = self._relative.get(prompt)
            scale = self._mean * (1.0 if before is None else before)
            ratios[before is not None] += [round(n / scale, _DIGITS) for n in found]
            total = sum(found) / self._mean
            if before is None:
                now = (total + _PRIOR) / (len(found) + _PRIOR)
            else:
                now = _NEWEST * total / len(found) + (1 - _NEWEST) * before
            self._relative[prompt] = max(round(now, _DIGITS), 10**-_DIGITS)
            self._longest[prompt] = max(*found, self._longest.get(prompt, 0))
        for spread, new in ((self._known, ratios[True]), (self._new, ratios[False])):
            if new:
                spread.replace(new)

    def expected(self, prompt: int, generated: int, limit: int) -> int:
        """Return the expected length of an unfinished response that has ``generated`` tokens.

        It is the mean of the lengths above ``generated`` in the recorded spread, or half way to
        ``limit`` where no length was above it.

        Args:
            prompt: Index of the prompt in the data set.
            generated: Tokens so far.
            limit: Limit of a response, in tokens.

        Returns:
            Tokens, above ``generated`` and at most ``limit``.
        """
        scale = self._mean * self._relative.get(prompt, 1.0)
        known = prompt in self._relative and self._known.ratios
        spread = self._known if known else self._new
        beyond = spread.mean_beyond(generated / scale) if scale else None
        guess = (generated + limit) / 2 if beyond is None else scale * beyond
        return max(generated + 1, min(limit, round(guess)))

    def expected_lengths(self, num_prompts: int, limit: int) -> list[int]:
        """Return the expected length of every prompt in tokens; empty while nothing is known."""
        return [self.expected(i, 0, limit) for i in range(num_prompts)] if self else []

    def longest(self, prompt: int) -> int | None:
        """Return the tokens of the longest response to a prompt; ``None`` where none is known."""
        return self._longest.get(prompt)

    def state_dict(self) -> dict[str, Any]:
        """Return the history as JSON values."""
        return {
            "mean": self._mean,
            "relative": [[prompt, value] for prompt, value in self._relative.items()],
            "longest": [[prompt, value] for prompt, value in self._longest.items()],
            "known": list(self._known.ratios),
            "new": list(self._new.ratios),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, now or before it had the longest responses."""
        self._mean = float(state["mean"])
        self._relative = {int(prompt): float(value) for prompt, value in state["relative"]}
        longest = state.get("longest", ())
        self._longest = {int(prompt): int(value) for prompt, value in longest}
        self._known.replace(state["known"])
        self._new.replace(state["new"])


def assign_to_engines(
    prompts: Sequence[int], num_groups: int, history: LengthHistory | None, limit: int
) -> list[list[int]]:
    """Divide the samples of a step among the groups that generate, in number and work.

    With a history, samples are divided by expected length (:func:`.placement.partition`), which
    spreads the siblings of a hard prompt. Without one they are divided in order: neighbours share
    the prefix of their prompt in the cache.

    Args:
        prompts: Index of the prompt of each sample.
        num_groups: Number of groups of ranks that generate.
        history: History of lengths; ``None`` or empty: nothing is known.
        limit: Limit of a response, in tokens.

    Returns:
        [num_groups] lists of sample ids, ascending; every sample once.
    """
    count = len(prompts)
    if not history or num_groups == 1:
        borders = [count * i // num_groups for i in range(num_groups + 1)]
        return [list(range(a, b)) for a, b in pairwise(borders)]
    expected = {prompt: history.expected(prompt, 0, limit) for prompt in set(prompts)}
    return partition([expected[prompt] for prompt in prompts], num_groups)


def longest_first(samples: Sequence[int], left: Callable[[int], int]) -> list[int]:
    """Return samples sorted by the tokens that each has left, most first; equals keep their order.

    Longest processing time first: the last of the samples to start are short, so an engine whose
    places become free one after the other is idle for about one short response at its end.
    """
    return sorted(samples, key=lambda sample_id: -left(sample_id))
