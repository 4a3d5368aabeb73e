"""Rank functions that run on emulated NPUs and, for comparison, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from support.training_worlds import (
    Case,
    CaseResult,
    in_hf_coordinates,
    make_job,
    make_samples,
    run_case,
)

from mindspeed_rl.bootstrap import World

SMALL = ("--micro-batch-size", "3", "--make-vocab-size-divisible-by", "8", "--lr", "1e-3")


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """One model that was built, filled from its checkpoint, read back and trained.

    Attributes:
        names: parameters of the rank, which ``TrainEngine`` compares with the table.
        modules: classes of the modules of the last layer, by their names.
        changed: HF tensors that are not bit-identical after checkpoint -> device -> host.
        run: a forward and backward pass, and an update.
    """

    names: list[str]
    modules: dict[str, str]
    changed: list[str]
    run: CaseResult


def family_world(
    world: World, models: Mapping[str, str], vocab_size: int, flags: Sequence[str]
) -> dict[str, FamilyFacts]:
    """Every model in one layout; results are on rank 0."""
    from mindspeed_rl.orchestration import training

    facts: dict[str, FamilyFacts] = {}
    for name, folder in models.items():
        job = make_job(world, folder, [*SMALL, *flags])
        if not facts:
            training.initialize_parallel(job)
        engine = training.build_engine(job, "policy", 1)
        layer = engine.modules[0].decoder.layers[-1]
        # what was loaded: the checkpoint itself, not what the step below makes of it
        back = in_hf_coordinates(job, engine.named_parameters())
        source = load_file(Path(folder) / "model.safetensors")
        changed = [n for n, t in back.items() if world.rank == 0 and not torch.equal(t, source[n])]
        case = Case(name, (), "sft", num_steps=1)
        facts[name] = FamilyFacts(
            sorted(engine.named_parameters()),
            {part: type(module).__qualname__ for part, module in layer.named_modules()},
            changed,
            run_case(job, engine, case, make_samples(vocab_size)),
        )
    return facts
