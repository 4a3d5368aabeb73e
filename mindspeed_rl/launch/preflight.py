"""Before a run loads anything: does every process group of its layout answer in time?

Each group does an all-reduce and an uneven all-to-all, whose results are compared. Ranks tell each
other where they are through torchrun's store, so that a group that hangs is named with the ranks
that are in it and those that are not.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.diagnosis.rows import DoctorRow, green, red
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.planning.run_groups import all_groups_of_run
from mindspeed_rl.planning.run_plan import RLPlan
from mindspeed_rl.platforms.base import Platform

AREA = "collectives"
MEETING = "meeting"
"""Before any group: all ranks are here and make the groups."""
GRACE_S = 10.0
_ELEMENTS = 1024
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Axis:
    """The groups of one kind; a rank is in at most one of them."""

    name: str
    groups: tuple[tuple[int, ...], ...]

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group of a rank; empty where it is in none."""
        return next((group for group in self.groups if rank in group), ())


@dataclass(slots=True)
class Visit:
    """What one rank met in the groups of one axis.

    ``num_bytes`` is what became of the device's free memory (of the process on a CPU).
    """

    axis: str
    seconds: float
    num_bytes: int
    error: str = ""


@dataclass(slots=True)
class Account:
    """What one rank tells rank 0."""

    rank: int
    host: str = ""
    visits: list[Visit] = field(default_factory=list)

    @property
    def error(self) -> Visit | None:
        """The visit that failed; it is the last one."""
        return self.visits[-1] if self.visits and self.visits[-1].error else None


def axes_of(config: RLRunConfig, plan: RLPlan | None, world: int) -> list[Axis]:
    """Every kind of group that a run of this plan uses on its devices; the world without a plan."""
    if plan is None:
        return [Axis("world", (tuple(range(world)),))] if world > 1 else []
    assert plan.parallel.world == world
    return [Axis(name, groups) for name, groups in all_groups_of_run(config, plan).items()]


def exchange(
    group: dist.ProcessGroup, ranks: Sequence[int], rank: int, device: torch.device
) -> None:
    """An all-reduce and an uneven all-to-all-v of a group. Collective: the group.

    Raises:
        RuntimeError: a result is wrong.
    """
    total = torch.full((_ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(total, group=group)
    wanted = float(sum(r + 1 for r in ranks))
    if not bool((total == wanted).all()):
        raise RuntimeError(f"all-reduce gave {float(total[0])} instead of {wanted}")
    me = list(ranks).index(rank)
    to_each = [i + 1 for i in range(len(ranks))]
    sent = torch.cat(
        [torch.full((n,), float(rank * len(ranks) + n), device=device) for n in to_each]
    )
    received = torch.empty((me + 1) * len(ranks), device=device)
    dist.all_to_all_single(received, sent, [me + 1] * len(ranks), to_each, group=group)
    wanted_values = torch.cat(
        [torch.full((me + 1,), float(r * len(ranks) + me + 1)) for r in ranks]
    )
    if not torch.equal(received.cpu(), wanted_values):
        raise RuntimeError("all-to-all delivered other values than were sent")


class Preflight:
    """The visits of one rank.

    Args:
        world: this process among its peers.
        platform: its devices.
        store: seen by all ranks.
        axes: the same on all ranks.
        limit_s: of one group.
        check: what a group does.
        grace_s: how long rank 0 waits for the word of others after its own last group.
    """

    def __init__(
        self,
        world: World,
        platform: Platform,
        store: Store,
        axes: Sequence[Axis],
        limit_s: float,
        check: Callable[[dist.ProcessGroup, Sequence[int], int, torch.device], None] = exchange,
        grace_s: float = GRACE_S,
    ) -> None:
        self._world, self._platform, self._store = world, platform, store
        self._everyone = tuple(range(world.size))
        self._axes = (Axis(MEETING, (self._everyone,)), *axes)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._limit_s, self._check, self._grace_s = limit_s, check, grace_s
        self._account = Account(world.rank, os.uname().nodename)

    def run(self) -> list[DoctorRow]:
        """Visit every group; the rows on rank 0, nothing elsewhere. Collective: the world.

        A rank that gets no answer in ``limit_s`` ends its process, after rank 0 has reported.
        """
        for axis in self._axes:
            ranks = axis.group_of(self._world.rank)
            if not ranks:
                continue
            self._store.set(f"in/{self._world.rank}", axis.name)
            guard = threading.Timer(self._limit_s, self._give_up, (axis.name,))
            guard.daemon = True
            guard.start()
            visit = self._visit(axis, ranks)
            guard.cancel()
            self._account.visits.append(visit)
            if visit.error:
                break
        return self._tell()

    def _make_groups(self) -> None:
        # the guard is quicker, whatever a backend does when its own limit is over
        limit = timedelta(seconds=4 * self._limit_s)
        for ranks in dict.fromkeys(group for axis in self._axes[1:] for group in axis.groups):
            if ranks == self._everyone:
                group = dist.group.WORLD
            else:
                group = dist.new_group(list(ranks), timeout=limit)
            assert group is not None
            self._groups[ranks] = group

    def _visit(self, axis: Axis, ranks: tuple[int, ...]) -> Visit:
        before, start, error = self._held_bytes(), time.monotonic(), ""
        try:
            if axis.name == MEETING:
                self._make_groups()
            else:
                self._check(self._groups[ranks], ranks, self._world.rank, self._platform.device)
                self._platform.synchronize()
        except (RuntimeError, ValueError) as failure:
            error = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
        return Visit(axis.name, time.monotonic() - start, self._held_bytes() - before, error)

    def _held_bytes(self) -> int:
        memory = self._platform.memory()
        return memory.used_bytes if self._platform.shares_host_memory else -memory.free_bytes

    def _give_up(self, axis: str) -> None:
        """On a thread of its own: the main one is stuck in a collective."""
        error = f"no answer in {self._limit_s:g} s"
        self._account.visits.append(Visit(axis, self._limit_s, 0, error))
        rows = self._tell()
        for row in rows:
            print(f"RED   {row.what}\n      fix: {row.fix}", file=sys.stderr, flush=True)
        os._exit(1)

    def _tell(self) -> list[DoctorRow]:
        """Hand in the account; rank 0 waits for all and makes rows, the others wait for that."""
        rank, size = self._world.rank, self._world.size
        self._store.set(f"account/{rank}", json.dumps(asdict(self._account)))
        patience = self._limit_s + self._grace_s
        if rank != 0:
            # the launcher ends all ranks with the first one, so nobody may go before rank 0
            wait_for(self._store, ["reported"], patience + self._grace_s)
            return []
        present = wait_for(self._store, [f"account/{r}" for r in range(size)], patience)
        accounts = [_account(self._store.get(key).decode()) for key in present]
        last = {
            r: self._store.get(f"in/{r}").decode() if self._store.check([f"in/{r}"]) else "none"
            for r in range(size)
        }
        rows = list(preflight_rows(self._axes, accounts, last, self._limit_s))
        self._store.set("reported", "1")
        return rows


def wait_for(store: Store, keys: Sequence[str], seconds: float) -> list[str]:
    """Those of ``keys`` that are there within some seconds, as soon as all are."""
    deadline = time.monotonic() + seconds
    while True:
        present = [key for key in keys if store.check([key])]
        if len(present) == len(keys) or time.monotonic() > deadline:
            return present
        time.sleep(0.05)


def preflight_rows(
    axes: Sequence[Axis], accounts: Sequence[Account], last: dict[int, str], limit_s: float
) -> Iterator[DoctorRow]:
    """What the accounts of all ranks say. Pure.

    Args:
        axes: in the order in which they were visited.
        accounts: of the ranks that handed one in.
        last: axis that each rank entered last.
        limit_s: of one group.
    """
    visits = {(a.rank, v.axis): v for a in accounts for v in a.visits}
    hosts = {a.rank: a.host for a in accounts}
    reported = {a.rank for a in accounts}
    for axis in axes:
        inside = [visits[r, axis.name] for g in axis.groups for r in g if (r, axis.name) in visits]
        failed = [g for g in axis.groups if _errors(g, axis.name, visits)]
        for group in failed:
            yield _failed_row(axis.name, group, visits, last, hosts)
        if failed:
            return  # what comes later was not visited by all
        if len(inside) < sum(map(len, axis.groups)):
            continue  # a rank is missing, which is told of below, or by a later axis
        if axis.name == MEETING:
            yield green(AREA, f"{len(inside)} ranks on {len(set(hosts.values()))} hosts meet")
            continue
        slowest = max(inside, key=lambda v: v.seconds)
        held = max(v.num_bytes for v in inside) / _MIB
        yield green(
            AREA,
            f"{axis.name}: {len(axis.groups)} x {len(axis.groups[0])} ranks; all-reduce and "
            f"all-to-all-v right, slowest {slowest.seconds:.2f} s, {max(held, 0.0):.0f} MiB taken",
        )
    for rank, name in last.items():
        if rank not in reported:
            yield red(AREA, f"rank {rank} said nothing in {limit_s:g} s; the last group that it "
                      f"entered: {name}", "look at its output; is its process alive?")  # fmt: skip


def _errors(group: Sequence[int], axis: str, visits: dict[tuple[int, str], Visit]) -> list[str]:
    found = [visits[r, axis].error for r in group if (r, axis) in visits]
    return list(dict.fromkeys(error for error in found if error))


def _failed_row(
    axis: str,
    group: Sequence[int],
    visits: dict[tuple[int, str], Visit],
    last: dict[int, str],
    hosts: dict[int, str],
) -> DoctorRow:
    here = [r for r in group if (r, axis) in visits or last.get(r) == axis]
    missing = [r for r in group if r not in here]
    where = "; ".join(f"rank {r} on {hosts.get(r, 'an unknown host')}" for r in missing[:4])
    lost = f"; not in it: {where}" if missing else "; all of its ranks are in it"
    nodes = sorted({hosts[r] for r in group if r in hosts})
    return red(
        AREA,
        f"{axis} of ranks {', '.join(map(str, group))}: {'; '.join(_errors(group, axis, visits))}"
        f"{lost}",
        f"links between {', '.join(nodes) or 'its nodes'}: interface variables, firewall, "
        "hccn_tool (NPU) or nccl-tests (CUDA); then rows above",
    )


def _account(text: str) -> Account:
    raw = json.loads(text)
    return Account(raw["rank"], raw["host"], [Visit(**visit) for visit in raw["visits"]])
