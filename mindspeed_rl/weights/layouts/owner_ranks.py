"""Owner ranks of rectangles as arithmetic progressions, merged where they interleave."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.models.rules import Cut


def merge_owner_ranks(several: list[range]) -> list[range]:
    """Merge ranges into one where they interleave into an arithmetic progression."""
    first, count = several[0], len(several)
    if count == 1:
        return several
    starts = [owner_ranks.start for owner_ranks in several]
    gap = starts[1] - starts[0]
    evenly = gap > 0 and starts == list(range(starts[0], starts[0] + gap * count, gap))
    alike = all(h.step == first.step and len(h) == len(first) for h in several)
    if evenly and alike and (gap * count == first.step or len(first) == 1):
        return [range(starts[0], several[-1][-1] + 1, gap)]
    return several


def boxes_kept_twice(found: Iterable[tuple[Cut, list[range]]]) -> set[Box]:
    """Return the rectangles that some rank keeps in two places (redundant experts).

    Their owner ranks are not merged, so that the places of one rank have equal ranges.
    """
    of_box: dict[Box, list[range]] = {}
    for cut, several in found:
        of_box.setdefault(cut.hf_box, []).extend(several)
    return {
        box
        for box, several in of_box.items()
        if len(several) > 1 and len(set().union(*several)) < sum(map(len, several))
    }
