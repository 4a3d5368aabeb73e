"""Chooses the batch sizes for which decode graphs are captured.

A decode step with ``r`` running sequences is padded to the next captured size. The decode steps of
a run are counted in a histogram: running sequences -> decode steps. Steps above the largest size
run without a graph, so the largest batch of the histogram is always captured.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from pathlib import Path

from mindspeed_rl.core.errors import UsageError

AUTO = ("auto",)
"""Value of ``--rollout-graph-sizes`` that asks for sizes chosen from the history."""

HISTORY_FILE = "decode_batches.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Captured sizes and their padding on a histogram.

    Attributes:
        sizes: Captured sizes, ascending.
        rows: Running sequences, summed over all decode steps.
        padded_rows: The same sum with every step padded to a captured size.
    """

    sizes: tuple[int, ...]
    rows: int
    padded_rows: int

    @property
    def waste(self) -> float:
        """Fraction of the padded rows that is padding."""
        return 1 - self.rows / self.padded_rows


def decode_batches(response_lengths: Sequence[int], capacity: int) -> Counter[int]:
    """Count the decode steps that generate responses: running sequences -> decode steps.

    The first token of a response comes from its prefill, so ``n`` tokens are ``n - 1`` decode
    steps.

    Args:
        response_lengths: Lengths of the responses in tokens, in the order of their start.
        capacity: Sequences that run at once; the next one starts when one ends.
    """
    waiting = [length - 1 for length in response_lengths if length > 1]
    ends = waiting[:capacity]
    heapify(ends)
    found: Counter[int] = Counter()
    now, following = 0, iter(waiting[capacity:])
    while ends:
        end = ends[0]
        if end > now:
            found[len(ends)] += end - now
            now = end
        heappop(ends)
        if (length := next(following, None)) is not None:
            heappush(ends, now + length)
    return found


def best_graph_sizes(histogram: Mapping[int, int], count: int) -> GraphSizes:
    """Choose at most ``count`` sizes with the least padding, and the fewest among equal choices.

    Dynamic programming over the sizes that occur, O(sizes^2 x count): an optimal size is always
    one that occurs.

    Args:
        histogram: Running sequences -> decode steps; both positive, and not empty.
        count: Number of graphs that may be captured, at least 1.
    """
    candidates = sorted(histogram)
    num = len(candidates)
    steps_below = [0, *accumulate(histogram[size] for size in candidates)]
    # best[i]: rows of the steps up to candidate i, and the sizes chosen for them, the last being i
    best: list[tuple[int, tuple[int, ...]]] = [
        (size * steps_below[i + 1], (size,)) for i, size in enumerate(candidates)
    ]
    for _ in range(1, min(count, num)):
        previous, best = best, list(best)
        for i in range(1, num):
            for j in range(i):
                rows = previous[j][0] + candidates[i] * (steps_below[i + 1] - steps_below[j + 1])
                if rows < best[i][0]:
                    best[i] = (rows, (*previous[j][1], candidates[i]))
    padded_rows, sizes = best[-1]
    rows = sum(running * steps for running, steps in histogram.items())
    return GraphSizes(sizes, rows, padded_rows)


def limited(histogram: Mapping[int, int], sequences: int) -> Counter[int]:
    """Return a histogram of an engine with a limit of ``sequences``, from that of another. Pure.

    Larger batches, which an earlier run had, count as full ones.
    """
    found: Counter[int] = Counter()
    for running, steps in histogram.items():
        found[min(running, sequences)] += steps
    return found


def even_graph_sizes(sequences: int, count: int) -> tuple[int, ...]:
    """Return at most ``count`` sizes at equal distances, the largest being ``sequences``. Pure.

    For the first steps of a run, of which nothing is known: a step is padded by less than
    ``sequences / count`` sequences.
    """
    return tuple(sorted({-(-sequences * i // count) for i in range(1, count + 1)}))


def num_default_sizes(sequences: int) -> int:
    """Return the number of sizes that vLLM-Ascend captures when it is given none. Pure.

    Source: ``VllmConfig._set_cudagraph_sizes`` of vLLM (1, 2, 4, every 8th below 256, then every
    16th), up to the number of sequences and to 512, as vLLM-Ascend limits it.
    """
    most = min(sequences, 512)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)}
    return sum(size <= most for size in sizes)


def read_history(output_dir: Path) -> Counter[int]:
    """Read the histogram of the earlier steps of a run; it is empty when there is no file.

    Raises:
        UsageError: The file is not a histogram of decode steps.
    """
    path = output_dir / HISTORY_FILE
    if not path.is_file():
        return Counter()
    try:
        found = json.loads(path.read_text())
        if found["format"] != _FORMAT:
            raise UsageError(f"format {found['format']}")
        return Counter({int(running): int(steps) for running, steps in found["steps"].items()})
    except (
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise UsageError(
            f"{path} is not a histogram of decode steps ({error}); remove it and "
            "--rollout-graph-sizes auto starts without it"
        ) from error


def write_history(output_dir: Path, histogram: Mapping[int, int]) -> None:
    """Write the histogram into the output directory of a run, atomically."""
    path = output_dir / HISTORY_FILE
    steps = {str(running): histogram[running] for running in sorted(histogram)}
    output_dir.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({"format": _FORMAT, "steps": steps}) + "\n")
    draft.replace(path)
