"""Rank function: the second stage has one micro-batch more than the first, so both wait for ever.

A thread of each rank tells where it stands, as the watchdog does, and ends the rank.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from support.batches import local_batches
from support.training_worlds import TrainSample, start_job

from mindspeed_rl.algorithms.losses import supervised_loss
from mindspeed_rl.building.models import build_engine
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.platforms import flight_recorder

STUCK_S = 3.0
LIMIT_S = 120.0


def stuck_world(world: World, model: str, folder: str, samples: Sequence[TrainSample]) -> None:
    """Never returns: every rank writes ``position-RANK.json`` and ends with exit code 3."""
    recorder = flight_recorder.install()
    job = start_job(world, model, ["--pipeline-model-parallel-size", "2"])
    engine = build_engine(job, "policy", 1, 1.0)
    batches = local_batches(job, engine, samples)
    batches = batches[:1] * (2 + world.rank)
    threading.Thread(target=_tell, args=(recorder, world.rank, Path(folder)), daemon=True).start()
    engine.forward_backward(batches, lambda inputs: supervised_loss(inputs, 1))
    engine.gradient_norm()


def _tell(recorder: flight_recorder.FlightRecorder, rank: int, folder: Path) -> None:
    """Write the position when this rank has waited long enough in one call, and leave together."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        time.sleep(0.2)
        position = recorder.position()
        if not any(call.seconds > STUCK_S for call in position.waits):
            continue
        (folder / f"position-{rank}.json").write_text(json.dumps(asdict(position)))
        if len(list(folder.glob("position-*.json"))) == 2:
            break
    time.sleep(1.0)
    os._exit(3)
