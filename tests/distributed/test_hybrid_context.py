"""Rows on some of the context-parallel ranks train as rows on all of them, and as on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.spawn import run_ranks
from support.tiers import slow_but

from mindspeed_rl.launch.bootstrap import World

if TYPE_CHECKING:
    import torch
    from support.training_worlds import CaseResult

    from mindspeed_rl.core.types import TrainSample

pytestmark = pytest.mark.distributed

# Only the order of sums differs, and the padding that experts see: in fp32 by up to 2.1e-6 of the
# gradient of a parameter, in fp64 by 4.1e-15, so that this is rounding.
TOLERANCE, GRADIENT_TOLERANCE, DOUBLE_TOLERANCE = 1e-6, 5e-6, 1e-13
COMMON = ("--make-vocab-size-divisible-by", "8", "--max-prompt-length", "12",
          "--rollout-max-response-length", "20")  # fmt: skip
_CP2, _CP4 = ("--context-parallel-size", "2"), ("--context-parallel-size", "4")
_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_PP2 = ("--pipeline-model-parallel-size", "2")
_EP4 = ("--expert-model-parallel-size", "4")
_EP2 = ("--expert-model-parallel-size", "2")
EXPERTS = ("qwen3-moe", "deepseek")
# ranks, layout, tokens of a rank, models
LAYOUTS = {
    "cp4": (4, _CP4, 10, ("qwen3", *EXPERTS)),
    "cp4-ep4": (4, (*_CP4, *_EP4), 10, EXPERTS),
    "cp2-ep2": (2, (*_CP2, *_EP2), 16, EXPERTS),
    "cp2-pp2": (4, (*_CP2, *_PP2), 16, ("qwen3", *EXPERTS)),
    "cp2-tp2": (4, (*_CP2, *_TP2), 16, ("qwen2-tied", *EXPERTS)),
    "cp2-dp2": (4, (*_CP2, *_EP4), 16, ("qwen3-moe",)),
}
ONE_RANK = (1, (), 128, ("qwen3", "qwen2-tied", *EXPERTS))
QUICK = ("cp4-ep4",)
# Of each model and way: all results, the sizes of groups, and this rank's gradients in fp64.
Results = dict[str, tuple["CaseResult", list[int], dict[str, "torch.Tensor"]]]


def both_ways(
    world: World,
    layout: Sequence[str],
    tokens: int,
    models: dict[str, str],
    samples: Sequence[TrainSample],
) -> Results:
    """Rank function: each model with rows on some ranks and on all, in fp32 and in fp64."""
    from support.training_worlds import Case, run_case, start_job

    from mindspeed_rl.building.models import batch_rules, build_engine

    hybrid = ("--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank", str(tokens))
    found: Results = {}
    for name, model in models.items():
        for kind, flags in (("hybrid", hybrid), ("static", ())):
            job = start_job(world, model, [*COMMON, *layout, *flags])
            engine = build_engine(job, "policy", 1, job.config.rl.rl_default_temperature)
            plan = batch_rules(job).plan([s.length for s in samples])
            sizes = {place.size for places in plan.places or () for place in places}
            result = run_case(job, engine, Case(kind, num_steps=1), samples)
            double = gradients_in_double(job, samples) if world.size > 1 else {}
            found[f"{name}/{kind}"] = (result, sorted(sizes), double)
    return found


def gradients_in_double(job: Any, samples: Sequence[TrainSample]) -> dict[str, torch.Tensor]:
    """This rank's gradients of one optimizer step that is computed in fp64. Collective."""
    from support.batches import local_batches
    from support.double_precision import double_precision
    from support.training_worlds import Case, make_loss, with_reference

    from mindspeed_rl.building.models import build_engine

    with double_precision():
        engine = build_engine(job, "policy", 1, job.config.rl.rl_default_temperature)
    batches = with_reference(local_batches(job, engine, samples))  # alike in both precisions
    with double_precision():
        engine.forward_backward(batches, make_loss(Case("double"), samples, []))
        return engine.gradients()


@pytest.fixture(scope="session")
def worlds(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[Results]]:
    from support.family_models import VOCAB
    from support.training_worlds import make_samples

    @cache
    def run(name: str) -> list[Results]:
        ranks, flags, tokens, names = LAYOUTS.get(name, ONE_RANK)
        paths = {model: str(models[model]) for model in names}
        args = (flags, tokens, paths, make_samples(VOCAB))
        folder = tmp_path_factory.mktemp(f"hybrid-{name}")
        return run_ranks(both_ways, ranks, work_dir=folder, args=args)

    return run


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, QUICK))
def test_rows_on_some_ranks_train_as_rows_on_all(
    layout: str, worlds: Callable[[str], list[Results]]
) -> None:
    found, one_rank = worlds(layout)[0], worlds("one rank")[0]
    _, flags, _, names = LAYOUTS[layout]
    for model in names:
        hybrid, sizes, _ = found[f"{model}/hybrid"]
        static, none, _ = found[f"{model}/static"]
        assert none == [] and {1, int(flags[1])} <= set(sizes), (model, sizes)
        one, *_ = one_rank[f"{model}/static"]
        for where, other in (("all ranks", static), ("one rank", one)):
            compare(hybrid, other, f"{model} against {where}")


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, QUICK))
def test_in_double_precision_nothing_but_rounding_is_left(
    layout: str, worlds: Callable[[str], list[Results]]
) -> None:
    """Each rank has whole gradients of its weights, so the same rank can be compared."""
    import torch
    from support.training_worlds import relative_errors

    for rank in worlds(layout):
        for model in LAYOUTS[layout][3]:
            (*_, hybrid), (*_, static) = rank[f"{model}/hybrid"], rank[f"{model}/static"]
            assert {g.dtype for g in (*hybrid.values(), *static.values())} == {torch.float64}
            errors = relative_errors(hybrid, static)
            worst = max((error, name) for name, error in errors.items())
            assert worst[0] <= DOUBLE_TOLERANCE, (model, worst)


def compare(found: CaseResult, other: CaseResult, label: str) -> None:
    """All numbers of an update are the same, but for rounding."""
    from support.training_worlds import relative_errors

    for part in ("logprobs", "entropies", "annotated"):
        for a, b in zip(getattr(found, part), getattr(other, part), strict=True):
            error = (a - b).abs() / b.abs().clamp(min=1.0)
            assert float(error.max()) <= TOLERANCE, (label, part)
    for part, limit in (("gradients", GRADIENT_TOLERANCE), ("weights", TOLERANCE)):
        errors = relative_errors(getattr(found, part), getattr(other, part))
        worst = max((error, name) for name, error in errors.items())
        assert worst[0] <= limit, (label, part, worst)
    assert found.metrics == pytest.approx(other.metrics, rel=TOLERANCE, abs=TOLERANCE), label


def sums_of_rows(world: World) -> tuple[dict[int | None, int], set[timedelta], int]:
    """Rank function: the sum over a row of 1, 2, 4 and all ranks; each rank gives 10 ** rank.

    Also the limits of the layout's groups, and how many groups are left without it.
    """
    import torch
    import torch.distributed as dist

    from mindspeed_rl.core.context_parallelism import GATHERED
    from mindspeed_rl.core.layout import ParallelLayout
    from mindspeed_rl.core.stages import even_stages
    from mindspeed_rl.platforms.process_groups import process_groups
    from mindspeed_rl.platforms.registry import select_platform
    from mindspeed_rl.samples.packing import pack
    from mindspeed_rl.trainer import parallel_state
    from mindspeed_rl.trainer.train_engine import context_of

    select_platform("cpu").install()
    layout = ParallelLayout.build(
        world=world.size, stages=even_stages(1, 1), cp=world.size, hybrid_context=True
    )
    parallel_state.initialize(layout, 0, timeout_minutes=5)
    _, *groups = process_groups()
    limits = {g._get_backend(torch.device("cpu")).options._timeout for g in groups}
    found = {}
    for size in (1, 2, 4, None):
        context = context_of(pack([], 8, shared_by=size), layout, GATHERED, world.rank)
        value = torch.tensor(10**world.rank)
        if context.size > 1:
            dist.all_reduce(value, group=context.group)
        found[size] = int(value)
    parallel_state.forget()
    return found, limits, len(process_groups())


def test_sums_over_a_row_are_over_the_ranks_that_share_it(tmp_path: Path) -> None:
    ranks = run_ranks(sums_of_rows, 4, work_dir=tmp_path)
    found = [sums for sums, _, _ in ranks]
    assert [of[1] for of in found] == [1, 10, 100, 1000]
    assert [of[2] for of in found] == [11, 11, 1100, 1100]
    assert [(of[4], of[None]) for of in found] == [(1111, 1111)] * 4
    assert [(limits, left) for _, limits, left in ranks] == [({timedelta(minutes=5)}, 1)] * 4
