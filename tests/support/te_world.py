"""Worlds whose trainer is made of Transformer Engine's modules, which a double stands in for."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from support.training_worlds import Case, WorldResult, train_world
from support.warm_ranks import Server

from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.launch.bootstrap import World

_DOUBLE = str(Path(__file__).with_name("te_double"))
_PATH = os.pathsep.join([_DOUBLE, *(entry for entry in sys.path if entry)])
# megatron-core asks for Transformer Engine while it is imported
TE_SERVER = Server(environment={"PYTHONPATH": _PATH})


@dataclass(frozen=True, slots=True)
class TeResult:
    """What a world gave on rank 0, and how many modules of each class of the double it made."""

    result: WorldResult
    made: dict[str, int]


def te_world(
    world: World,
    layout: Sequence[str],
    cases: Sequence[Case],
    model: str,
    samples: Sequence[TrainSample],
) -> TeResult | None:
    """Rank function: ``train_world`` as if the CPU could run Transformer Engine."""
    import transformer_engine

    assert transformer_engine.__version__ == "2.11.0"
    with mock.patch("mindspeed_rl.config.kernels.has_transformer_engine", lambda platform: True):
        result = train_world(world, layout, cases, model, samples)
    return TeResult(result, dict(transformer_engine.pytorch.MADE)) if result else None
