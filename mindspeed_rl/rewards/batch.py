"""The samples of one scoring, in the order of their arrival: which wait, which are scored."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mindspeed_rl.rewards.types import RewardRequest, RewardResult, RewardStatus


class Batch:
    """Requests by position, and their results.

    Attributes:
        requests: all that have arrived.
        waiting: positions that no worker has.
        num_open: how many have no result.
    """

    def __init__(self, requests: Sequence[RewardRequest] = ()) -> None:
        self.requests: list[RewardRequest] = []
        self.waiting: deque[int] = deque()
        self.num_open = 0
        self._results: list[RewardResult | None] = []
        for request in requests:
            self.add(request)

    def add(self, request: RewardRequest) -> None:
        """A further sample."""
        self.waiting.append(len(self.requests))
        self.requests.append(request)
        self._results.append(None)
        self.num_open += 1

    def take(self, num: int) -> list[int]:
        """The next waiting positions."""
        return [self.waiting.popleft() for _ in range(min(num, len(self.waiting)))]

    def give_back(self, positions: deque[int]) -> None:
        """Positions that their worker has not started wait again, before the others."""
        self.waiting.extendleft(reversed(positions))
        positions.clear()

    def finish(self, position: int, result: RewardResult) -> None:
        """The result of a sample."""
        assert self._results[position] is None, f"sample at {position} scored twice"
        self._results[position] = result
        self.num_open -= 1

    def fail(self, position: int, reward: float | None, status: RewardStatus, detail: str) -> None:
        """A sample that no function has scored."""
        sample_id = self.requests[position].sample_id
        self.finish(position, RewardResult(sample_id, reward, {}, status, detail))

    def results(self) -> list[RewardResult]:
        """One per request, in their order, when all are there."""
        found = [result for result in self._results if result is not None]
        assert len(found) == len(self.requests), (len(found), len(self.requests))
        return found
