"""Records how many bytes of the device each owner holds at every border between phases.

Owners report the bytes of their storages. The bytes in use beyond these are the residue: libraries,
allocator caches, activations that are still referenced. A residue that grows step by step is a
leak.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression

from mindspeed_rl.core.tables import aligned
from mindspeed_rl.metrics.metric_set import Max, MetricSet
from mindspeed_rl.platforms.base import DeviceMemory

_MIB, _GIB = 2**20, 2**30
_WINDOW = 20  # Steps whose residues show a leak.
_LEAST = 10  # Fewer show no trend.
# Steps at the start in which libraries, allocators and engines still take what they keep.
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Border:
    """The device's memory at the moment when a state was reached.

    Attributes:
        owners: Bytes by owner.
        device: Numbers of the driver.
    """

    owners: dict[str, int]
    device: DeviceMemory

    @property
    def owned_bytes(self) -> int:
        """Sum of the bytes that owners hold."""
        return sum(self.owners.values())

    @property
    def residue_bytes(self) -> int:
        """Bytes in use that have no owner."""
        return self.device.used_bytes - self.owned_bytes


def slope_per_step(values: Sequence[float]) -> tuple[float, float]:
    """Return the least-squares slope of values, one per step, and its standard error. Pure.

    (0, infinity) for fewer than 5 values. Source: simple linear regression, residual variance over
    n - 2 degrees of freedom.
    """
    n = len(values)
    if n < 5:
        return 0.0, math.inf
    slope, intercept = linear_regression(range(n), values)
    variance = math.fsum((y - intercept - slope * x) ** 2 for x, y in enumerate(values)) / (n - 2)
    spread = math.fsum((x - (n - 1) / 2) ** 2 for x in range(n))
    return slope, math.sqrt(variance / spread)


class MemoryLedger:
    """Measures owners at every border, enforces the budget, and warns of a growing residue. Local.

    Args:
        owners: Owner -> function that returns the bytes it holds now.
        read: Returns the driver's numbers.
        budget_bytes: Bytes of the device that the run may use; ``None`` means all of them.
        leak_bytes: Growth of the residue per step above which to warn; 0 means never.
        predicted: Bytes by state and owner after the first update, where they are predicted.
    """

    def __init__(
        self,
        owners: Mapping[str, Callable[[], int]],
        read: Callable[[], DeviceMemory],
        budget_bytes: int | None,
        leak_bytes: float,
        predicted: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        self._owners = owners
        self._read = read
        self._budget_bytes = budget_bytes
        self._leak_bytes = leak_bytes
        self._predicted = predicted or {}
        self._residues: deque[int] = deque(maxlen=_WINDOW)
        self._steps = 0
        self._warned = False
        self.borders: dict[str, Border] = {}

    def at_border(self, state: str) -> None:
        """Record the memory of all owners when ``state`` was reached.

        Raises:
            MemoryError: More is in use than the budget allows; the message has the table.
        """
        owners = {owner: num_bytes() for owner, num_bytes in self._owners.items()}
        border = Border(owners, self._read())
        self.borders.pop(state, None)  # so that the latest border is the last entry
        self.borders[state] = border
        budget = self._budget_bytes
        if budget is not None and border.device.used_bytes > budget:
            raise MemoryError(self._message(f"{_gib(border.device.used_bytes)} in use", budget))
        if state == "train":
            self._watch(border.residue_bytes)

    def require_free(self, num_bytes: int) -> None:
        """Check that memory is free before it is taken, so that the error can show the table.

        Raises:
            MemoryError: The driver or the budget has less left; the message has the table.
        """
        device = self._read()
        free = device.free_bytes
        if self._budget_bytes is not None:
            free = min(free, self._budget_bytes - device.used_bytes)
        if device.total_bytes and num_bytes > free:
            what = f"{_gib(num_bytes)} are needed now and {_gib(max(0, free))} are free"
            raise MemoryError(self._message(what, self._budget_bytes or device.total_bytes))

    def _watch(self, residue_bytes: int) -> None:
        self._steps += 1
        if self._steps <= _WARM_UP:
            return
        self._residues.append(residue_bytes)
        if self._warned or not self._leak_bytes or len(self._residues) < _LEAST:
            return
        slope, error = slope_per_step(self._residues)
        if slope - 2 * error > self._leak_bytes:
            self._warned = True
            print(
                "warning: memory that no owner accounts for grew by "
                f"{slope / _MIB:.0f} MiB per step (+- {2 * error / _MIB:.0f}) over the last "
                f"{len(self._residues)} steps, more than --memory-leak-mb "
                f"{self._leak_bytes / _MIB:g}; MiB by owner at each border:\n{self.table()}",
                file=sys.stderr,
                flush=True,
            )

    def metrics(self) -> MetricSet:
        """Return the bytes at the last crossing of each border, as the maximum over ranks."""
        found = MetricSet()
        for state, border in self.borders.items():
            found[f"memory/{state}_used_bytes"] = Max(border.device.used_bytes)
            found[f"memory/{state}_owned_bytes"] = Max(border.owned_bytes)
            for owner, num_bytes in border.owners.items():
                found[f"memory/{state}/{owner}_bytes"] = Max(num_bytes)
            if state in self._predicted:
                total = sum(self._predicted[state].get(owner, 0) for owner in self._owners)
                found[f"memory/{state}_predicted_bytes"] = Max(total)
        return found

    def table(self) -> str:
        """Format all borders so far as a table in MiB, a column each; predictions in brackets."""
        states = list(self.borders)
        rows = [["owner", *states]]
        for owner in self._owners:
            rows.append([owner, *(self._cell(state, owner) for state in states)])
        borders = [self.borders[state] for state in states]
        rows.append(["without owner", *(_number(b.residue_bytes) for b in borders)])
        rows.append(["in use", *(_number(b.device.used_bytes) for b in borders)])
        return "\n".join(aligned(rows))

    def _cell(self, state: str, owner: str) -> str:
        text = _number(self.borders[state].owners[owner])
        predicted = self._predicted.get(state, {}).get(owner)
        return text if predicted is None else f"{text} ({_number(predicted)})"

    def _message(self, what: str, limit_bytes: int) -> str:
        remedy = _GENERAL
        if self.borders:
            last = list(self.borders.values())[-1]
            sizes = last.owners | {_NOBODY: last.residue_bytes}
            remedy = _REMEDIES.get(max(sizes, key=lambda owner: sizes[owner]), _GENERAL)
        return (
            f"device memory: {what}, of {_gib(limit_bytes)} that the run may use; "
            f"{remedy}\nMiB by owner at each border:\n{self.table()}"
        )


_GENERAL = (
    "raise --device-memory-gb, lower --rollout-kv-cache-gb, or take --rl-offload all and "
    "--rollout-sleep all"
)
_NOBODY = ""
_REMEDIES = {
    _NOBODY: "most of it is owned neither by trainer nor by engine (libraries, allocator caches, "
    "on a host everything of the process): raise --device-memory-gb",
    "kv_cache": "most of it is the key/value cache: lower --rollout-kv-cache-gb",
    "optimizer": "most of it is optimizer state: shard it with --use-distributed-optimizer, or, "
    "during rollouts, take --rl-offload optimizer",
    "grad_buffers": "most of it is gradients: raise --tensor-model-parallel-size or "
    "--pipeline-model-parallel-size, or, during rollouts, take --rl-offload optimizer",
    "parameters": "most of it is the trainer's weights: raise --tensor-model-parallel-size "
    "or --pipeline-model-parallel-size, or, during rollouts, take --rl-offload all",
    "engine_weights": "most of it is the engine's weights: take --rollout-sleep all, or raise "
    "--rollout-tp",
}


def _number(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.3g} GiB"
