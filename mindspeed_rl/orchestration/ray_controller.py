"""The one process that drives the ranks of a run in Ray, by control messages alone.

It starts an actor per rank, orders stage after stage, and checks that all ranks stand before the
same stage of the same samples. Like torchrun's agent it holds the key-value store in which ranks
meet and tell failures, so that it knows of one as soon as they do, and whatever rank dies.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_rl import bootstrap
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.validate import RLPlan
from mindspeed_rl.orchestration.limits import Limits
from mindspeed_rl.orchestration.ray_cluster import (
    actor_options,
    cluster,
    device_of,
    rank_environments,
    reserve,
)
from mindspeed_rl.orchestration.ray_worker import Begin, Reply, remote_class
from mindspeed_rl.orchestration.stages import Stage
from mindspeed_rl.orchestration.torchrun import USAGE_ERROR, Checked

if TYPE_CHECKING:
    from mindspeed_rl.orchestration.failures import FailureBoard

STAGES = "mindspeed_rl.train_rl:stages"
POLL_S = 0.2  # how late a failure may be noticed
LEAVE_S = 10.0  # for the exit handlers of the ranks
LOGS_S = 1.0  # for the last lines of the ranks to arrive
# Whatever the model, the lengths and the number of samples: names and a few numbers, and a pair of
# numbers per gap among the sample ids.
MESSAGE_BYTES = 512
RANGE_BYTES = 24


class RunEnded(Exception):
    """The run has failed.

    Args:
        text: for the user.
        exit_code: of the command.
        with_stacks: every rank that reads of the failure dumps its stacks.
    """

    def __init__(self, text: str, exit_code: int = 1, *, with_stacks: bool = False) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.with_stacks = with_stacks


@dataclass
class Traffic:
    """What went between the driver and its ranks once they had begun.

    Attributes:
        num_messages: orders and replies.
        total_bytes: of them, pickled.
        max_bytes: the largest.
        skews_s: of every order: from its arrival at the first rank to that at the last.
    """

    num_messages: int = 0
    total_bytes: int = 0
    max_bytes: int = 0
    skews_s: list[float] = field(default_factory=list)

    def count(self, message: Stage | Reply) -> None:
        """One message; it must have the size of one."""
        size = len(pickle.dumps(message))
        stage = message.stage if isinstance(message, Reply) else message
        allowed = MESSAGE_BYTES + RANGE_BYTES * (len(stage.samples.ranges) if stage else 0)
        assert size <= allowed, f"a control message of {size} bytes: {message!r:.200}"
        self.num_messages += 1
        self.total_bytes += size
        self.max_bytes = max(self.max_bytes, size)

    def __str__(self) -> str:
        skew_ms = 1e3 * max(self.skews_s, default=0.0)
        return (
            f"{len(self.skews_s)} stages, {self.num_messages} messages of at most "
            f"{self.max_bytes} bytes ({self.total_bytes} in all), start skew at most "
            f"{skew_ms:.1f} ms"
        )


class Ranks:
    """The actors of a run and the store in which they meet.

    Args:
        ray: the module, connected.
        actors: by rank.
        board: reads the failures that ranks publish.
    """

    def __init__(self, ray: Any, actors: Sequence[Any], board: FailureBoard, prog: str) -> None:
        self._ray = ray
        self._actors = actors
        self._board = board
        self._prog = prog
        self._calls: list[Any] = []  # that ranks are to answer
        self.traffic = Traffic()

    def begin(self, orders: Sequence[Begin]) -> Stage | None:
        """All ranks start; the stage that they stand before."""
        calls = [a.begin.remote(order) for a, order in zip(self._actors, orders, strict=True)]
        return self._agreed(self._answers(calls, "start"))

    def go_on(self, stage: Stage) -> Stage | None:
        """All ranks do a stage; the next one, ``None`` at the end."""
        self.traffic.count(stage)
        replies = self._answers([a.go_on.remote(stage) for a in self._actors], str(stage))
        for reply in replies:
            self.traffic.count(reply)
        began = [reply.began_s for reply in replies]
        self.traffic.skews_s.append(max(began) - min(began))
        return self._agreed(replies)

    def leave(self) -> None:
        """Let the processes end by themselves."""
        calls = [actor.__ray_terminate__.remote() for actor in self._actors]
        self._ray.wait(calls, num_returns=len(calls), timeout=LEAVE_S)

    def let_end(self, limit_s: float) -> None:
        """Give ranks that read of a failure the time to dump their stacks and end.

        Those that cannot (a stopped process) are waited for until the limit, in seconds.
        """
        self._ray.wait(self._calls, num_returns=len(self._calls), timeout=limit_s)

    def kill(self) -> None:
        """End what is left of them."""
        for actor in self._actors:
            self._ray.kill(actor)

    def _agreed(self, replies: Sequence[Reply]) -> Stage | None:
        for rank, reply in enumerate(replies):
            if reply.refused:
                raise RunEnded(f"{self._prog}: error: {reply.refused}", USAGE_ERROR)
            if reply.stage != replies[0].stage:
                raise RunEnded(
                    f"{self._prog}: the ranks disagree: rank 0 stands before {replies[0].stage}, "
                    f"rank {rank} before {reply.stage}"
                )
        return replies[0].stage

    def _answers(self, calls: Sequence[Any], doing: str) -> list[Reply]:
        """Of all ranks; the first failure of any of them ends the run at once.

        A mistake that one node sees is an answer, which others would wait for.
        """
        replies: dict[int, Reply] = {}
        rank_of = {call: rank for rank, call in enumerate(calls)}
        pending = self._calls = list(calls)
        while pending:
            ready, pending = self._ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
            self._raise_told()
            for call in ready:
                replies[rank_of[call]] = self._answer(call, rank_of[call], doing)
            refused = next((r for r in replies.values() if r.refused), None)
            if refused is not None:
                self._agreed([refused])
        return [replies[rank] for rank in range(len(calls))]

    def _answer(self, call: Any, rank: int, doing: str) -> Reply:
        try:
            reply: Reply = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            self._raise_told()
            raise RunEnded(
                f"{self._prog}: the job ends: rank {rank} is gone ({doing}):\n{error}"
            ) from error
        return reply

    def _raise_told(self) -> None:
        told = self._board.told()
        if told is not None:
            text = f"{told.trace}{self._prog}: {told}"
            raise RunEnded(text, told.exit_code, with_stacks=told.with_stacks)


def drive(
    prog: str,
    checked: Checked[RLRunConfig, RLPlan],
    arguments: Sequence[str],
    limits: Limits | None = None,
    stages: str = STAGES,
) -> int:
    """Run a command line in Ray; the exit code.

    Args:
        prog: of messages.
        checked: the command line.
        arguments: the command line, as typed.
        limits: patience of the ranks' watchdogs.
        stages: ``module:function`` of the work.
    """
    config = checked.parsed.config
    try:
        with cluster(config.launch, local_cpus(config, checked.plan)) as ray:
            try:
                _drive(ray, prog, config, arguments, limits or Limits(), stages)
            finally:
                time.sleep(LOGS_S)
    except RunEnded as ended:
        print(ended, file=sys.stderr, flush=True)
        return ended.exit_code
    except ValueError as error:
        if not _is_usage_error(error):
            raise
        print(f"{prog}: error: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"{prog}: stopped by SIGINT", file=sys.stderr, flush=True)
        return 1
    return 0


def _drive(
    ray: Any,
    prog: str,
    config: RLRunConfig,
    arguments: Sequence[str],
    limits: Limits,
    stages: str,
) -> None:
    launch = config.launch
    device = device_of(config.parallel.platform, ray.cluster_resources())
    group = reserve(ray, launch, device)
    kind = remote_class(ray)
    actors = [
        kind.options(**actor_options(ray, group, rank // launch.ray_ranks_per_node, device)).remote(
            rank
        )
        for rank in range(launch.num_ranks)
    ]
    places = [actor.where.remote() for actor in actors]
    store, board = open_board(launch.num_ranks)  # imports torch while they start
    ranks = Ranks(ray, actors, board, prog)
    try:
        endpoint = (ray.util.get_node_ip_address(), int(store.port))
        variable = device[1] if device else ""
        found = ray.get(places)
        environments = rank_environments(found, launch.ray_ranks_per_node, endpoint, variable)
        orders = [
            Begin(prog, tuple(arguments), env, os.getcwd(), stages, limits) for env in environments
        ]
        stage = ranks.begin(orders)
        while stage is not None:
            stage = ranks.go_on(stage)
        ranks.leave()
        print(f"control by Ray: {ranks.traffic}", flush=True)
    except RunEnded as ended:
        if ended.with_stacks:
            ranks.let_end(limits.end_s)
        raise
    finally:
        ranks.kill()
        ray.util.remove_placement_group(group)


def local_cpus(config: RLRunConfig, plan: RLPlan) -> int:
    """CPUs that a local Ray says it has: places for all actors of the run.

    They share the real ones, as the processes of torchrun do.
    """
    per_engine = config.environment.rl_environment_ray_workers
    if config.rewards_in_ray:
        per_engine += config.rewards.reward_num_workers
    return config.launch.num_ranks + plan.engine.num_groups * per_engine


def open_board(num_ranks: int) -> tuple[Any, FailureBoard]:
    """The store of a run, at a port of its own, and what ranks tell in it. Imports torch."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # this process has no device
    bootstrap.quiet_libraries()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from mindspeed_rl.orchestration.failures import FailureBoard, Member
    from mindspeed_rl.orchestration.launcher_store import shared_part

    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    driver = Member(-1, -1, os.getpid())
    return store, FailureBoard(shared_part(store), driver, num_ranks)


def _is_usage_error(error: ValueError) -> bool:
    from mindspeed_rl.orchestration.failures import is_usage_error

    return is_usage_error(error)
