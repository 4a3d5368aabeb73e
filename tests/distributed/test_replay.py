"""Records of a step in several layouts, and what they say differs first.

Real megatron-core on gloo ranks; a step is a pass without gradient, an update pass and an optimizer
step on samples that every rank has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.spawn import run_ranks

from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.replay.compare import differences
from mindspeed_rl.replay.record import SampleStage, StepRecord, TensorStage, TokenStage

pytestmark = pytest.mark.distributed

BASE = ("--make-vocab-size-divisible-by", "8", "--lr", "1e-3", "--micro-batch-size", "2",
        "--max-tokens-per-micro-batch", "0")  # fmt: skip
CLIP = ("--grpo-clamp-eps-lower", "0.02", "--grpo-clamp-eps-upper", "0.02")
ROUNDING = 1e-4
GRADIENT, CHANGE = "policy update 1, gradient", "policy update 1, change of weights"


@dataclass(frozen=True)
class Case:
    """One step from the same weights.

    Attributes:
        flags: beside those of the layout.
        bad_layer: number of a layer whose MLP is a thousandth too large; 0: none is.
        bad_rank: rank on which it is so.
    """

    flags: tuple[str, ...] = ()
    bad_layer: int = 0
    bad_rank: int = 0


def record_steps(
    world: World, model: str, layout: Sequence[str], cases: Sequence[Case]
) -> list[tuple[StepRecord, float]]:
    """Rank function: the record of every case, and the gradient norm that its update found."""
    import torch
    from support.batches import local_batches
    from support.training_worlds import make_samples, start_job, with_logprobs, with_reference

    from mindspeed_rl.algorithms.losses import LossSettings, policy_loss
    from mindspeed_rl.algorithms.types import Denominators
    from mindspeed_rl.building.models import build_engine
    from mindspeed_rl.replay.recorder import StepRecorder

    samples = make_samples(307)
    samples = with_logprobs(samples, [torch.full((s.num_trained,), -5.7) for s in samples])
    counts = Denominators.of(s.num_trained for s in samples)
    found = []
    for case in cases:
        job = start_job(world, model, [*BASE, *layout, *case.flags])
        engine = build_engine(job, "policy", 1)
        if case.bad_layer and world.rank == case.bad_rank:
            for layer in engine.modules[0].decoder.layers:
                if layer.layer_number == case.bad_layer:
                    layer.mlp.register_forward_hook(
                        lambda module, args, output: (output[0] * 1.001, *output[1:])
                    )
        settings = LossSettings(surrogate=job.config.surrogate, kl_beta=0.05, entropy_weight=0.01)
        loss = partial(policy_loss, settings=settings, denominators=counts)
        batches = with_reference(local_batches(job, engine, samples))
        recorder = StepRecorder({"policy": engine})
        with recorder.recording():
            engine.logprobs(batches)
            engine.forward_backward(batches, loss)
            norm = engine.step().grad_norm
        engine.logprobs(batches)  # nobody looks any more
        found.append((StepRecord(1, {}, {}, recorder.stages(world.rank)), norm))
    return found


LAYOUTS: dict[str, tuple[int, tuple[str, ...], tuple[Case, ...]]] = {
    "one": (
        1,
        (),
        (Case(), Case(), Case(("--lr", "2e-3")), Case(CLIP)),
    ),
    "dp2": (2, ("--use-distributed-optimizer",), (Case(), Case(bad_layer=3, bad_rank=1))),
    "tp2": (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel"), (Case(),)),
    "cp2": (2, ("--context-parallel-size", "2"), (Case(),)),
    "pp2": (
        2,
        ("--pipeline-model-parallel-size", "2", "--recompute-granularity", "full",
         "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        (Case(),),
    ),
}  # fmt: skip
Recorded = Callable[[str], list[tuple[StepRecord, float]]]


@pytest.fixture(scope="module")
def recorded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Name of a layout -> its records."""

    @cache
    def run(name: str) -> list[tuple[StepRecord, float]]:
        num_ranks, layout, cases = LAYOUTS[name]
        folder = tmp_path_factory.mktemp(name)
        args = (str(tiny_model), layout, cases)
        result: list[tuple[StepRecord, float]] = run_ranks(
            record_steps, num_ranks, work_dir=folder, args=args
        )[0]
        return result

    return run


def stage(record: StepRecord, name: str) -> Any:
    return next(s for s in record.stages if s.name == name)


def test_a_record_has_every_stage_in_the_order_of_the_computation(recorded: Recorded) -> None:
    record, _ = recorded("one")[0]
    hidden = [
        "hidden states before layer 1",
        *(f"hidden states after layer {n}" for n in range(1, 5)),
    ]
    known = ["tokens of prompts", "tokens of responses", "log-probs of the engine", "advantages",
             "old log-probs", "log-probs of the reference"]  # fmt: skip
    names = [s.name for s in record.stages]
    assert names[:2] == ["policy pass 1, tokens of prompts", "policy pass 1, tokens of responses"]
    assert {f"policy pass 1, {n}" for n in known} == set(names[: len(known)])
    assert names[len(known) :] == [
        *(f"policy pass 1, {n}" for n in (*hidden, "log-probs")),
        *(f"policy update 1, {n}" for n in (*hidden, "log-probs")),
        GRADIENT,
        CHANGE,
    ]
    first, last = stage(record, names[1]), stage(record, "policy update 1, log-probs")
    assert isinstance(first, TokenStage) and isinstance(last, TokenStage)
    # A log-prob is of the token at its place: both have the same places.
    assert np.array_equal(first.place, last.place) and np.array_equal(first.sample, last.sample)
    assert len(first.value) == 82 and len(stage(record, names[0]).value) == 49
    assert list(stage(record, GRADIENT).tensor[:1]) == ["lm_head.weight"], "backwards"


def test_the_same_step_has_the_same_record(recorded: Recorded) -> None:
    first, again = (record for record, _ in recorded("one")[:2])
    assert differences(first, again, 0.0) == [] and first.num_values > 500


def test_another_learning_rate_differs_in_the_change_of_weights_alone(recorded: Recorded) -> None:
    base, other = recorded("one")[0][0], recorded("one")[2][0]
    for tolerance in (0.0, ROUNDING):
        found = differences(other, base, tolerance)
        assert [d.stage for d in found] == [CHANGE]
    assert differences(other, base, 0.0)[0].where == "model.embed_tokens.weight"


def test_another_clip_differs_in_the_gradient_first(recorded: Recorded) -> None:
    base, other = recorded("one")[0][0], recorded("one")[3][0]
    for tolerance in (0.0, ROUNDING):
        assert differences(other, base, tolerance)[0].stage == GRADIENT


@pytest.mark.parametrize(
    "name",
    ["dp2", "tp2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cp2", "pp2"))],
)
def test_another_layout_differs_by_rounding_alone(recorded: Recorded, name: str) -> None:
    """And every element of the gradient counts once: megatron-core finds the same norm."""
    base, record = recorded("one")[0][0], recorded(name)[0][0]
    assert differences(record, base, ROUNDING) == []
    exact = differences(record, base, 0.0)
    assert exact or name == "pp2", "stages of a pipeline may compute the bits of one rank"
    assert all("tokens" not in difference.stage for difference in exact)
    for one, norm in (recorded("one")[0], recorded(name)[0]):
        gradient = stage(one, GRADIENT)
        assert isinstance(gradient, TensorStage)
        assert math.sqrt(gradient.digest[:, 0].sum()) == pytest.approx(norm, rel=1e-5)


def test_a_wrong_layer_of_one_rank_is_named(recorded: Recorded) -> None:
    base, bad = (record for record, _ in recorded("dp2"))
    after = stage(base, "policy pass 1, hidden states after layer 3")
    assert isinstance(after, SampleStage) and set(after.rank.tolist()) == {0, 1}
    samples = after.sample[after.rank == 1].tolist()
    for tolerance in (0.0, ROUNDING):
        first = differences(bad, base, tolerance)[0]
        assert first.stage == after.name
        assert first.where == f"sample {samples[0]}, computed by rank 1"
