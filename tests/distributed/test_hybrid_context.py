"""Rows on some of the context-parallel ranks train as rows on all of them, and as on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.spawn import run_ranks
from support.tiers import slow_but

from mindspeed_rl.launch.bootstrap import World

if TYPE_CHECKING:
    from support.training_worlds import CaseResult

    from mindspeed_rl.core.types import TrainSample

pytestmark = pytest.mark.distributed

# Only the order of sums differs, and the padding that experts see. Static rows differ from one rank
# by up to 1.5e-6 of the gradient of a parameter, and hybrid ones from static ones by 2.4e-6.
TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 5e-6
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
Results = dict[str, tuple["CaseResult", list[int]]]


def both_ways(
    world: World,
    layout: Sequence[str],
    tokens: int,
    models: dict[str, str],
    samples: Sequence[TrainSample],
) -> Results:
    """Rank function: each model with rows on some ranks and on all; and the sizes of groups."""
    from support.training_worlds import Case, run_case, start_job

    from mindspeed_rl.rl.build_models import batch_rules, build_engine

    hybrid = ("--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank", str(tokens))
    found: Results = {}
    for name, model in models.items():
        for kind, flags in (("hybrid", hybrid), ("static", ())):
            job = start_job(world, model, [*COMMON, *layout, *flags])
            engine = build_engine(job, "policy", 1, job.config.rl.rl_default_temperature)
            plan = batch_rules(job).plan([s.length for s in samples])
            sizes = {place.size for places in plan.places or () for place in places}
            result = run_case(job, engine, Case(kind, num_steps=1), samples)
            found[f"{name}/{kind}"] = (result, sorted(sizes))
    return found if world.rank == 0 else {}


@pytest.fixture(scope="session")
def worlds(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Results]:
    from support.family_models import VOCAB
    from support.training_worlds import make_samples

    @cache
    def run(name: str) -> Results:
        ranks, flags, tokens, names = LAYOUTS.get(name, ONE_RANK)
        paths = {model: str(models[model]) for model in names}
        args = (flags, tokens, paths, make_samples(VOCAB))
        folder = tmp_path_factory.mktemp(f"hybrid-{name}")
        result: Results = run_ranks(both_ways, ranks, work_dir=folder, args=args)[0]
        return result

    return run


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, QUICK))
def test_rows_on_some_ranks_train_as_rows_on_all(
    layout: str, worlds: Callable[[str], Results]
) -> None:
    found, one_rank = worlds(layout), worlds("one rank")
    _, flags, _, names = LAYOUTS[layout]
    for model in names:
        (hybrid, sizes), (static, none) = found[f"{model}/hybrid"], found[f"{model}/static"]
        assert none == [] and {1, int(flags[1])} <= set(sizes), (model, sizes)
        one, _ = one_rank[f"{model}/static"]
        for where, other in (("all ranks", static), ("one rank", one)):
            compare(hybrid, other, f"{model} against {where}")


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
