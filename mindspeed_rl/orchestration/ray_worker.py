"""A rank as a Ray actor: the same process as under torchrun, told when to go on.

Nothing heavy is imported here: the environment of a rank is set before torch is.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_rl import bootstrap
from mindspeed_rl.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.validate import RLPlan, check_rl
from mindspeed_rl.orchestration.limits import Limits
from mindspeed_rl.orchestration.ray_cluster import Where
from mindspeed_rl.orchestration.stages import Stage
from mindspeed_rl.orchestration.torchrun import Job, check_run, end_job, start_job

Stages = Callable[[Job[RLRunConfig, RLPlan]], Iterator[Stage]]


@dataclass(frozen=True, slots=True)
class Begin:
    """The first order.

    Attributes:
        prog: of messages.
        arguments: the command line.
        environment: what makes this process a rank.
        folder: of relative paths.
        stages: ``module:function`` of the work.
        limits: patience of the watchdog.
    """

    prog: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    stages: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class Reply:
    """What a rank says when it has done what it was told.

    Attributes:
        stage: the one that it stands before; ``None``: it has ended.
        began_s: when the order arrived, in seconds of the clock.
        refused: the user's mistake that only this node sees; it ends the run.
    """

    stage: Stage | None
    began_s: float
    refused: str = ""


class RankActor:
    """One rank. All methods but `where` are collective: the world."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._next: Stage | None = None

    def __repr__(self) -> str:
        return f"rank {self._rank}"  # Ray labels lines of output with it

    def where(self) -> Where:
        """Its node and devices."""
        import ray

        context = ray.get_runtime_context()
        devices = tuple(i for ids in context.get_accelerator_ids().values() for i in ids)
        return Where(context.get_node_id(), os.getpid(), devices)

    def begin(self, order: Begin) -> Reply:
        """Become a rank, and go to the first stage."""
        began_s = time.time()
        os.environ.update(order.environment)
        try:
            _enter(order.folder)
            parsed = parse(RLRunConfig, list(order.arguments), order.prog)
            world = bootstrap.World.from_environment()
            checked = check_run(parsed, check_rl, world.size)
        except ValueError as error:
            return Reply(None, began_s, str(error))
        self._job = start_job(order.prog, checked, world, order.limits, driver_tells=True)
        module, _, function = order.stages.partition(":")
        try:
            work: Stages = getattr(importlib.import_module(module), function)
            self._stages = work(self._job)
        except BaseException as error:
            self._job.watchdog.fail(error)
        return self._advance(began_s)

    def go_on(self, stage: Stage) -> Reply:
        """Do the stage that this rank stands before, which must be this one."""
        began_s = time.time()
        if stage != self._next:
            error = RuntimeError(f"the driver orders {stage}; this rank stands before {self._next}")
            self._job.watchdog.fail(error)
        return self._advance(began_s)

    def _advance(self, began_s: float) -> Reply:
        try:
            self._next = next(self._stages, None)
            if self._next is None:
                end_job(self._job)
        except BaseException as error:
            self._job.watchdog.fail(error)
        return Reply(self._next, began_s)


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise ValueError(
            f"node {os.environ['GROUP_RANK']} cannot enter {folder} ({error.strerror}), the folder "
            "of the command: every node must see it"
        ) from None


def remote_class(ray: Any) -> Any:
    """The actor's class for Ray."""
    return ray.remote(RankActor)
