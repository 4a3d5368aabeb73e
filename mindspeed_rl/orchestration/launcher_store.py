"""The key-value store of the job's launcher, as what watches the ranks reaches it."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from mindspeed_rl.bootstrap import World
from mindspeed_rl.orchestration.failures import Failure, FailureBoard, Member
from mindspeed_rl.orchestration.limits import Limits


def this_member(world: World) -> Member:
    """This process, as others name it."""
    return Member(world.rank, int(os.environ.get("GROUP_RANK", "0")), os.getpid())


def connect(rank: int, timeout_s: float) -> PrefixStore:
    """A connection of one's own to torchrun's store: the default group's may be blocked.

    The store is there before the ranks are, so it tells of failures of ranks that never join.
    Under another launcher rank 0 opens it here, and shares it with the process group later.

    Raises:
        RuntimeError: the launcher of the first node, which holds the store, is not there.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(
            host, port, is_master=opens, timeout=timedelta(seconds=timeout_s), multi_tenant=True
        )
    except dist.DistError as error:
        raise RuntimeError(
            f"the launcher of the first node does not answer at {host}:{port} for "
            f"{timeout_s:g} s: it has ended, see its output, or MASTER_ADDR is wrong"
        ) from error
    return shared_part(store)


def shared_part(store: TCPStore) -> PrefixStore:
    """What of the driver's store is about heartbeats and failures; that of this (re)start."""
    run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"mindspeed_rl/{run}", store)


def publish_usage_error(world: World, text: str, limits: Limits) -> None:
    """Let the other nodes know a mistake that this rank found before it could join them.

    Returns when they have had the time to read it.
    """
    me = this_member(world)
    failure = Failure("usage", me, "start", text, me)
    try:
        FailureBoard(connect(world.rank, limits.connect_s), me, world.size).tell(failure)
    except RuntimeError:  # the first node has ended, and with it the job: nobody waits
        return
    time.sleep(limits.linger_s)
