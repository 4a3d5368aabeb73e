"""Whose activations and gradients a pipeline stage receives, in which order."""

from __future__ import annotations

import pytest
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from mindspeed_rl.trainer.pipeline import received


def test_a_plain_pipeline_takes_micro_batches_in_order() -> None:
    assert received(3, 0, 3, 1) == ([], [0, 1, 2])
    assert received(3, 1, 3, 1) == ([0, 1, 2], [0, 1, 2])
    assert received(3, 2, 3, 1) == ([0, 1, 2], [])


def test_an_interleaved_pipeline_by_hand() -> None:
    """Two stages with two chunks each: 0 and 1 through the first chunks, then the second."""
    assert received(4, 0, 2, 2) == ([0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 2, 3])
    assert received(4, 1, 2, 2) == ([0, 1, 0, 1, 2, 3, 2, 3], [0, 1, 2, 3])


@pytest.mark.parametrize(("pp", "vpp", "num"), [(2, 3, 6), (4, 2, 8)])
def test_an_interleaved_pipeline_is_that_of_megatron_core(pp: int, vpp: int, num: int) -> None:
    table = get_schedule_table(num, vpp, pp)
    for stage in range(pp):
        activations, gradients = received(num, stage, pp, vpp)
        assert activations == [m for m, chunk in table if stage or chunk]
        behind = [m for m, chunk in table if stage < pp - 1 or chunk < vpp - 1]
        assert sorted(gradients) == sorted(behind)
