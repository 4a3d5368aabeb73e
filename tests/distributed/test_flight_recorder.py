"""The flight recorder sees the collectives of the libraries, and a rank that is out of step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.spawn import RankError, run_ranks

from mindspeed_rl.core.flights import Position, stuck_lines

pytestmark = pytest.mark.distributed


def test_another_number_of_micro_batches_is_seen_where_both_stages_wait(
    tiny_model: Path, tmp_path: Path
) -> None:
    """By megatron-core's own receive and the collective in which the other stage is."""
    from support.stuck_world import stuck_world
    from support.training_worlds import make_samples

    args = (str(tiny_model), str(tmp_path), make_samples(307))
    with pytest.raises(RankError):
        run_ranks(stuck_world, 2, work_dir=tmp_path, args=args)
    positions = {
        rank: Position.from_json(json.loads((tmp_path / f"position-{rank}.json").read_text()))
        for rank in range(2)
    }
    told = "\n".join(stuck_lines(positions, {0: "update", 1: "update"}))
    assert re.search(
        r"^rank 1 waits in recv from rank 0 of pipeline_model_parallel_group \(ranks 0-1\), "
        r"float32\[\d+, 1, 128\], at pipeline_parallel/p2p_communication\.py:\d+; "
        r"rank 0 \(phase update\) waits in ",
        told, re.MULTILINE,
    ), told  # fmt: skip
    assert re.search(r"^rank 0 waits in .*; missing there: rank 1; rank 1 .* waits in recv", told,
                     re.MULTILINE), told  # fmt: skip
