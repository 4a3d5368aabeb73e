"""What training learns does not depend on where samples were made, moved and packed.

Against one sample per micro-batch on every rank. What was moved is not fetched once more for the
logs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from make_tiny_model import write_tiny_model
from support.spawn import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_they_are_those_of_one_rank_without_packing(tmp_path: Path) -> None:
    from support.placed_gradients import SHAPES, gradients_world

    from mindspeed_rl.selftest import loss

    model = write_tiny_model(
        tmp_path / "model" / "any",
        family="llama",
        vocab_size=loss.VOCAB_SIZE,
        num_layers=2,
        num_heads=loss.NUM_HEADS,
        num_kv_heads=loss.NUM_HEADS,
    )
    found = run_ranks(gradients_world, 4, work_dir=tmp_path, args=(str(model),))[0]
    assert len(found) == len(SHAPES)
    for (tp, _, cp, _), (layout, updates) in zip(SHAPES, found.items(), strict=True):
        assert len(updates) == 4, "two optimizer steps, on one node and on two"
        for errors in updates:
            assert len(errors) > 10
            worst = max(errors, key=lambda name: errors[name])
            assert errors[worst] <= (2e-5 if tp * cp > 1 else 1e-6), (layout, worst, errors[worst])
