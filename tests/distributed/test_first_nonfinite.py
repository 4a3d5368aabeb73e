"""Numbers that are not finite are traced to the layer and rank where they begin, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.spawn import run_ranks

pytestmark = pytest.mark.distributed

FLAGS = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")


def test_layer_rank_and_pass_are_named(tiny_model: Path, tmp_path: Path) -> None:
    """Two stages of two tensor-parallel ranks; all ranks say the same."""
    from support.nonfinite_world import nonfinite_world
    from support.training_worlds import make_samples

    args = (str(tiny_model), FLAGS, make_samples(307))
    told = run_ranks(nonfinite_world, 4, work_dir=tmp_path, args=args)
    assert all(one == told[0] for one in told)
    qkv, fc2, loss, sound = told[0]
    assert "begin on rank 3, in the forward pass of micro-batch 0, in decoder.layers.0." in qkv
    assert "linear_qkv (layer 3 of the model" in qkv and "its weight holds 1 nan" in qkv
    assert "policy: gradient norm nan before update 1" in qkv and "--lr" in qkv
    # Its output is summed over both ranks: only one of them has the weight.
    assert "begin on rank 1, in the forward pass of micro-batch 0, in decoder.layers.0." in fc2
    assert "linear_fc2 (layer 1 of the model" in fc2
    assert "begin on rank 2-3, in the backward pass, in the loss" in loss
    assert "a second pass over the same micro-batches has a finite norm" in sound
