"""What devices have on and a CPU off computes the same: the wiring, on gloo.

The kernels behind the switches are the devices' own and are not here; megatron-core's schedules,
hooks and dispatchers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from support.family_models import FAMILY_CASES, VOCAB, write_family_model
from support.spawn import run_ranks
from support.training_worlds import Case, WorldResult, make_samples, relative_errors, train_world

from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.platforms.features import TransformerFeatures

FEATURES = TransformerFeatures(
    frozenset({"bias_activation_fusion", "bias_dropout_fusion"}),
    builds_on_device=True,
    overlaps_reduction=True,
    chooses_dispatcher=True,
)
COMMON = ("--micro-batch-size", "2", "--make-vocab-size-divisible-by", "8", "--lr", "2e-4")
SHARDED = (*COMMON, "--use-distributed-optimizer")
OVERLAP = "--overlap-grad-reduce"


def featured_world(
    world: World,
    layout: Sequence[str],
    cases: Sequence[Case],
    model: str,
    samples: Sequence[TrainSample],
) -> WorldResult | None:
    """Rank function: ``train_world`` as if the CPU were a device."""
    with mock.patch.object(CpuPlatform, "transformer_features", lambda platform: FEATURES):
        return train_world(world, layout, cases, model, samples)


def test_overlap_fusions_and_dispatchers_compute_the_same(tmp_path: Path) -> None:
    """Two ranks share experts and gradients over several micro-batches and two updates."""
    model = str(write_family_model(FAMILY_CASES["qwen3-moe"], tmp_path / "model"))
    layout = ("--expert-model-parallel-size", "2")
    allgather = ("--moe-token-dispatcher-type", "allgather")
    plain = Case("plain", COMMON, "sft", num_steps=2)
    devices = (
        Case("overlap", (*COMMON, OVERLAP), "sft", num_steps=2),
        Case("sharded", (*SHARDED, OVERLAP), "sft", num_steps=2),
        Case("allgather", (*COMMON, *allgather), "sft", num_steps=2),
    )
    args = (make_samples(VOCAB),)
    expected = run_ranks(
        train_world, 2, work_dir=tmp_path / "cpu", args=(layout, (plain,), model, *args)
    )[0].cases["plain"]
    found = run_ranks(
        featured_world, 2, work_dir=tmp_path / "devices", args=(layout, devices, model, *args)
    )[0].cases
    assert len(expected.gradients) > 20
    for case in devices:
        for name in ("gradients", "weights"):
            wanted = getattr(expected, name)
            errors = relative_errors(getattr(found[case.name], name), wanted)
            worst = max(errors, key=lambda key: errors[key])
            assert errors.keys() == wanted.keys()
            assert errors[worst] <= 1e-5, (case.name, name, worst, errors[worst])
