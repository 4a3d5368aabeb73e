"""Groups of ranks against the layout; real ranks are in tests/distributed/test_agreement.py."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.parallel import groups

LAYOUT = ParallelLayout.build(world=8, stages=even_stages(4, 2), tp=2, ep=2)


def test_every_rank_is_in_one_group_of_every_axis() -> None:
    lists = groups.rank_lists(LAYOUT)
    assert set(lists) == {"tp", "cp", "dp", "pp", "etp", "ep", "edp"}
    for axis, several in lists.items():
        assert sorted(rank for ranks in several for rank in ranks) == [*range(8)], axis
    assert lists["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert lists["pp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(("ranks", "agrees"), [([2, 3], True), ([3, 2], True), ([2, 6], False)])
def test_a_group_of_other_ranks_than_the_layout_is_refused(
    ranks: list[int], agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups.dist, "get_process_group_ranks", lambda group: ranks)
    monkeypatch.setattr(groups.dist, "get_rank", lambda: 3)
    group = cast(Any, None)
    if agrees:
        groups.check_group(LAYOUT, "tp", group)
    else:
        with pytest.raises(RuntimeError, match="tp group of rank 3"):
            groups.check_group(LAYOUT, "tp", group)


def test_nodes_of_different_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "gather_objects", lambda mine: [mine, mine])
    groups.check_equal_nodes(4)
    monkeypatch.setattr(groups, "gather_objects", lambda mine: [mine, 8])
    with pytest.raises(UsageError, match="--nproc-per-node"):
        groups.check_equal_nodes(4)
