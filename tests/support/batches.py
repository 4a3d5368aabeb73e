"""Samples as the micro-batches of this rank, without a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_rl.building.models import batch_rules
from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.samples.packing import MicroBatch


def local_batches(job: Any, engine: Any, samples: Sequence[TrainSample]) -> list[MicroBatch]:
    """This rank's share of samples that every rank has, packed and prepared. Local."""
    return list(engine.prepare(batch_rules(job).pack_own(samples)))
