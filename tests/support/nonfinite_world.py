"""Rank function: numbers that are not finite are put somewhere, and the trainer says where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from support.batches import local_batches
from support.training_worlds import TrainSample, start_job

from mindspeed_rl.algorithms.losses import supervised_loss
from mindspeed_rl.algorithms.types import LossInputs, LossOutputs
from mindspeed_rl.building.models import build_engine
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.trainer.nonfinite import require_finite, trace_nonfinite

#: rank and weight of it that gets one NaN; the second is of a product that is summed over ranks
BROKEN = (
    (3, "decoder.layers.0.self_attention.linear_qkv.weight"),
    (1, "decoder.layers.0.mlp.linear_fc2.weight"),
)


def nonfinite_world(
    world: World, model: str, flags: Sequence[str], samples: Sequence[TrainSample]
) -> list[str]:
    """What is told of each broken weight, of a loss with an infinite slope, and of a sound pass."""
    job = start_job(world, model, flags)
    engine = build_engine(job, "policy", 1, 1.0)
    batches = local_batches(job, engine, samples)
    tokens = sum(s.num_trained for s in samples)

    def plain(inputs: LossInputs) -> LossOutputs:
        return supervised_loss(inputs, tokens)

    def steep(inputs: LossInputs) -> LossOutputs:
        outputs = plain(inputs)
        return replace(outputs, loss=outputs.loss + (inputs.logprobs * 0.0).sqrt().sum())

    told = []
    for rank, name in BROKEN:
        weight = engine.named_parameters()[name].data
        kept = weight[1, 2].clone()
        if world.rank == rank:
            weight[1, 2] = math.nan
        engine.forward_backward(batches, plain)
        assert not math.isfinite(engine.gradient_norm())
        before = {n: p.clone() for n, p in engine.named_parameters().items()}
        try:
            require_finite(engine, batches, plain)
        except FloatingPointError as error:
            told.append(str(error))
        for n, p in engine.named_parameters().items():
            assert torch.equal(p.nan_to_num(), before[n].nan_to_num()), "nothing was updated"
        weight[1, 2] = kept
    told.append(trace_nonfinite(engine, batches, steep))
    told.append(trace_nonfinite(engine, batches, plain))
    engine.forward_backward(batches, plain)
    require_finite(engine, batches, plain)
    norm = engine.gradient_norm()
    assert engine.step().grad_norm == norm, "the norm before clipping is that of the update"
    return told
