"""A rank that builds a model, changes one thing about it, and asks whether that is noticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from support.training_worlds import make_job

from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.trainer.built_check import check_built

# an attribute of the model, by its path, and another value for it
Change = tuple[str, Any]
FLAGS = ("--make-vocab-size-divisible-by", "8")


def _attribute(model: Any, path: str) -> tuple[Any, str]:
    """The object and the name of its attribute."""
    *parents, name = path.split(".")
    found = reduce(
        lambda at, part: at[int(part)] if part.isdigit() else getattr(at, part), parents, model
    )
    return found, name


def _finding(model: Any, spec: Any, num_layers: int, change: Change) -> str:
    """What the check says about the changed model, which is put right again."""
    place, name = _attribute(model, change[0])
    before = getattr(place, name)
    value = change[1] * before if isinstance(before, torch.Tensor) else change[1]
    assert isinstance(before, torch.Tensor) or value != before, change
    setattr(place, name, value)
    try:
        check_built(model, spec, num_layers)
    except RuntimeError as error:
        return str(error)
    finally:
        setattr(place, name, before)
    return ""


def built_world(
    world: World, models: Mapping[str, str], changes: Mapping[str, Sequence[Change]]
) -> dict[str, list[str]]:
    """Rank function: findings by model, in the order of its changes.

    The last one of a model is of a chunk that has a layer less than it should.
    """
    from mindspeed_rl.building.models import build_engine, initialize_parallel

    found: dict[str, list[str]] = {}
    for name, folder in models.items():
        job = make_job(world, folder, FLAGS)
        if not found:
            initialize_parallel(job)
        (model,) = build_engine(job, "policy", 1).modules
        spec, layers = job.plan.spec, len(model.decoder.layers)
        found[name] = [_finding(model, spec, layers, change) for change in changes[name]]
        check_built(model, spec, layers)  # as it was built
        try:
            check_built(model, spec, layers + 1)
        except RuntimeError as error:
            found[name].append(str(error))
    return found
