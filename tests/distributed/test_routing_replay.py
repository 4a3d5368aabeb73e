"""Replayed routing in every layout and with recomputed layers: gradients of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.family_models import FAMILY_CASES, VOCAB, write_family_model
from support.spawn import run_ranks
from support.training_worlds import in_hf_coordinates, make_samples, relative_errors, start_job

from mindspeed_rl.launch.bootstrap import World

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Found = tuple[dict[str, torch.Tensor], float]
TOLERANCE = 2e-5
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform",
        "--recompute-num-layers", "1")  # fmt: skip
MOE = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EP2 = ("--expert-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
COMMON = ("--make-vocab-size-divisible-by", "8", "--rl-routing-replay", "trainer")
SMALL = ("--micro-batch-size", "2")
# layout -> ranks and flags of several runs in it
WORLDS = {
    "ep2": (2, {"recomputed": (*EP2, *SMALL, *FULL)}),
    "pp2": (2, {"recomputed": (*PP2, *SMALL, *FULL), "moe": (*PP2, *SMALL, *MOE)}),
    "vpp2": (2, {"moe": (*PP2, *SMALL, *MOE, "--num-virtual-stages-per-pipeline-rank", "2")}),
    "cp2": (2, {"plain": ("--context-parallel-size", "2", *SMALL)}),
    "tp2-ep2": (2, {"moe": (*TP2, *EP2, "--expert-tensor-parallel-size", "1", *SMALL, *MOE)}),
}


def replayed(
    world: World, model: str, runs: Sequence[Sequence[str]], replays: bool = True
) -> list[Found]:
    """Rank function: the gradient of an update after the routers drifted, and the agreement."""
    from support.batches import local_batches

    from mindspeed_rl.algorithms.losses import supervised_loss
    from mindspeed_rl.building.models import build_engine
    from mindspeed_rl.metrics.metric_set import Mean, MetricSet, reduce_metrics
    from mindspeed_rl.trainer.routing_replay import AGREEMENT

    samples = make_samples(VOCAB)
    num_tokens = sum(s.num_trained for s in samples)
    results: list[Found] = []
    for flags in runs:
        job = start_job(world, model, [*COMMON, *flags])
        routing = "replay" if replays else "compare"
        engine = build_engine(job, "policy", 1, routing=routing)
        batches = local_batches(job, engine, samples)
        engine.logprobs(batches)
        with torch.no_grad():
            for name, param in engine.named_parameters().items():
                if name.endswith("router.weight"):
                    param += 0.3 * torch.arange(param.numel()).sin().view_as(param)
        found = engine.forward_backward(batches, lambda x: supervised_loss(x, num_tokens))
        gradients = in_hf_coordinates(job, engine.gradients())
        silent = MetricSet({AGREEMENT: Mean(0.0, 0.0), "loss": Mean(0.0, 0.0)})
        results.append((gradients, reduce_metrics(silent.merge(found))[AGREEMENT]))
    return results


@pytest.fixture(scope="module", params=["qwen3-moe", "deepseek"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_family_model(FAMILY_CASES[request.param], folder / "model")


@pytest.fixture(scope="module")
def alone(model: Path) -> Found:
    """One rank, one micro-batch, nothing recomputed."""
    runs = [("--micro-batch-size", "100")]
    (found,) = run_ranks(replayed, 1, work_dir=model.parent, args=(str(model), runs))
    return found[0]  # type: ignore[no-any-return]


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Of all that is trained: the bias of a router is not."""
    errors = relative_errors(found, wanted)
    return max(e for name, e in errors.items() if not name.endswith("correction_bias"))


def test_the_drift_matters(model: Path, alone: Found) -> None:
    """Else the test below would hold without any replay."""
    runs = [("--micro-batch-size", "100")]
    args = (str(model), runs, False)
    (free,) = run_ranks(replayed, 1, work_dir=model.parent, args=args)
    gradients, agreement = alone
    # later layers see what the routing before them made of a token, so a few choices may differ
    assert free[0][1] == pytest.approx(agreement, abs=0.02), "compared without replay as well"
    assert 0.3 < agreement < 0.95
    assert worst(free[0][0], gradients) > 0.1
    assert all(float(g.norm()) > 0 for n, g in gradients.items() if n.endswith("mlp.gate.weight"))


@pytest.mark.parametrize("name", WORLDS)
def test_gradients_are_those_of_one_rank(name: str, model: Path, alone: Found) -> None:
    ranks, runs = WORLDS[name]
    args = (str(model), list(runs.values()))
    found = run_ranks(replayed, ranks, work_dir=model.parent, args=args)[0]
    for run, (gradients, agreement) in zip(runs, found, strict=True):
        assert worst(gradients, alone[0]) <= TOLERANCE, run
        assert agreement == pytest.approx(alone[1], rel=1e-6), run
