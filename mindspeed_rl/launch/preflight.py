"""Checks, before a run loads anything, that every process group of its layout answers in time.

Each group does an all-reduce and an uneven all-to-all, whose results are compared. Ranks report
which group they are in through torchrun's store, so that the report on a hanging group names the
ranks that entered it and those that did not.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from mindspeed_rl.core.ranks import counted
from mindspeed_rl.diagnosis.rows import DoctorRow, green, lines, red
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.platforms.base import Platform

AREA = "collectives"
CREATION = "group creation"
"""The first step, before any group is checked: all ranks create the process groups."""
GRACE_S = 10.0  # how long rank 0 waits for the reports of others after its own last group
_ELEMENTS = 1024
_MIB = 2**20

GroupKinds = Mapping[str, Sequence[tuple[int, ...]]]
"""Process groups by kind; a rank is in at most one group of a kind."""


@dataclass(slots=True)
class GroupResult:
    """One rank's result of checking its group of a kind.

    ``num_bytes`` is the decrease of the device's free memory; on a CPU the growth of the process.
    """

    seconds: float
    num_bytes: int
    error: str = ""


@dataclass(slots=True)
class RankReport:
    """The report of one rank to rank 0: its host, and results by kind up to one that failed."""

    host: str
    results: dict[str, GroupResult] = field(default_factory=dict)


def exchange(
    group: dist.ProcessGroup, ranks: Sequence[int], rank: int, device: torch.device
) -> None:
    """Do an all-reduce and an uneven all-to-all-v in a group. Collective: the group.

    Raises:
        RuntimeError: A result is wrong.
    """
    total = torch.full((_ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(total, group=group)
    wanted = float(sum(r + 1 for r in ranks))
    if not bool((total == wanted).all()):
        raise RuntimeError(f"all-reduce gave {float(total[0])} instead of {wanted}")
    # To member i of the group go i + 1 numbers, which say who sent them and to whom.
    me, size = list(ranks).index(rank), len(ranks)
    members = torch.arange(size, dtype=torch.float32)
    sent = (me * size + members).repeat_interleave(torch.arange(1, size + 1)).to(device)
    wanted_numbers = (members * size + me).repeat_interleave(me + 1)
    received = torch.empty_like(wanted_numbers, device=device)
    to_each = list(range(1, size + 1))
    dist.all_to_all_single(received, sent, [me + 1] * size, to_each, group=group)
    if not torch.equal(received.cpu(), wanted_numbers):
        raise RuntimeError("all-to-all delivered other values than were sent")


class Preflight:
    """The checks of one rank.

    Args:
        world: Rank of this process and number of ranks.
        platform: Platform of the devices.
        store: Store that all ranks see.
        groups: Groups to check, the same on all ranks.
        limit_s: Time limit of one group.
    """

    def __init__(
        self, world: World, platform: Platform, store: Store, groups: GroupKinds, limit_s: float
    ) -> None:
        self._world, self._platform, self._store = world, platform, store
        self._everyone = tuple(range(world.size))
        self._kinds: GroupKinds = {CREATION: (self._everyone,), **groups}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._limit_s = limit_s
        self._own = RankReport(os.uname().nodename)

    def run(self) -> list[DoctorRow]:
        """Check every group; return rows on rank 0, nothing elsewhere. Collective: the world.

        A rank that gets no answer within ``limit_s`` ends its process after rank 0 has reported.
        """
        rank = self._world.rank
        mine = {k: ranks for k, groups in self._kinds.items() for ranks in groups if rank in ranks}
        for kind, ranks in mine.items():
            self._store.set(f"in/{rank}", kind)
            guard = threading.Timer(self._limit_s, self._give_up, (kind,))
            guard.daemon = True
            guard.start()
            result = self._own.results[kind] = self._check_group(kind, ranks)
            guard.cancel()
            if result.error:
                break
        return self._report()

    def _make_groups(self) -> None:
        # The guard must act first, whatever a backend does at its own timeout.
        limit = timedelta(seconds=4 * self._limit_s)
        for ranks in dict.fromkeys(chain.from_iterable(self._kinds.values())):
            whole = ranks == self._everyone
            group = dist.group.WORLD if whole else dist.new_group(list(ranks), timeout=limit)
            assert group is not None
            self._groups[ranks] = group

    def _check_group(self, kind: str, ranks: tuple[int, ...]) -> GroupResult:
        before, start, error = self._held_bytes(), time.monotonic(), ""
        try:
            if kind == CREATION:
                self._make_groups()
            else:
                exchange(self._groups[ranks], ranks, self._world.rank, self._platform.device)
                self._platform.synchronize()
        except (RuntimeError, ValueError) as failure:
            error = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
        return GroupResult(time.monotonic() - start, self._held_bytes() - before, error)

    def _held_bytes(self) -> int:
        memory = self._platform.memory()
        return memory.used_bytes if self._platform.shares_host_memory else -memory.free_bytes

    def _give_up(self, kind: str) -> None:
        """End the process from a timer thread; the main thread is stuck in a collective."""
        self._own.results[kind] = GroupResult(self._limit_s, 0, f"no answer in {self._limit_s:g} s")
        print("\n".join(lines(self._report())), file=sys.stderr, flush=True)
        os._exit(1)

    def _report(self) -> list[DoctorRow]:
        """Send this rank's report; rank 0 turns all reports into rows while the others wait."""
        rank, store = self._world.rank, self._store
        store.set(f"report/{rank}", json.dumps(asdict(self._own)))
        patience = self._limit_s + GRACE_S
        if rank != 0:
            # The launcher ends all ranks with the first one, so rank 0 must end first.
            wait_for(store, ["reported"], patience + GRACE_S)
            return []
        present = wait_for(store, [f"report/{r}" for r in self._everyone], patience)
        reports = {int(key.partition("/")[2]): _rank_report(store.get(key)) for key in present}
        last = {r: store.get(k).decode() for r in self._everyone if store.check([k := f"in/{r}"])}
        rows = list(preflight_rows(self._kinds, reports, last, self._limit_s))
        store.set("reported", "1")
        return rows


def wait_for(store: Store, keys: Sequence[str], seconds: float) -> list[str]:
    """Return the ``keys`` that exist after some seconds, or as soon as all exist."""
    deadline = time.monotonic() + seconds
    while True:
        present = [key for key in keys if store.check([key])]
        if len(present) == len(keys) or time.monotonic() > deadline:
            return present
        time.sleep(0.05)


def preflight_rows(
    kinds: GroupKinds, reports: Mapping[int, RankReport], last: Mapping[int, str], limit_s: float
) -> Iterator[DoctorRow]:
    """Turn the reports of all ranks into rows. Pure.

    Args:
        kinds: Groups in the order of the checks; the first kind is one group of all ranks.
        reports: Reports by rank, of the ranks that sent one.
        last: Last kind of group that each rank entered, by rank.
        limit_s: Time limit of one group.
    """
    for kind, groups in kinds.items():
        results = {r: a.results[kind] for r, a in reports.items() if kind in a.results}
        bad = {rank for rank, result in results.items() if result.error}
        if bad:  # some ranks did not check later groups
            for group in groups:
                if not bad.isdisjoint(group):
                    yield _failed_row(kind, group, reports, last)
            return
        if len(results) < sum(map(len, groups)):
            continue  # a rank is missing: a later group or the end reports it
        if kind == CREATION:
            num_hosts = len({report.host for report in reports.values()})
            yield green(
                AREA, f"{counted(len(results), 'rank')} on {counted(num_hosts, 'host')} meet"
            )
            continue
        seconds = max(result.seconds for result in results.values())
        held = max(result.num_bytes for result in results.values()) / _MIB
        yield green(
            AREA,
            f"{kind}: {len(groups)} x {len(groups[0])} ranks; all-reduce and "
            f"all-to-all-v right, slowest {seconds:.2f} s, {max(held, 0.0):.0f} MiB taken",
        )
    (everyone,) = next(iter(kinds.values()))
    for rank in (r for r in everyone if r not in reports):
        yield red(AREA, f"rank {rank} said nothing in {limit_s:g} s; the last group that it "
                  f"entered: {last.get(rank, 'none')}",
                  "look at its output; is its process alive?")  # fmt: skip


def _failed_row(
    kind: str, group: Sequence[int], reports: Mapping[int, RankReport], last: Mapping[int, str]
) -> DoctorRow:
    inside = {r: a.results[kind] for r, a in reports.items() if r in group and kind in a.results}
    errors = dict.fromkeys(result.error for result in inside.values() if result.error)
    hosts = {r: reports[r].host for r in group if r in reports}
    missing = [r for r in group if r not in inside and last.get(r) != kind]
    where = "; ".join(f"rank {r} on {hosts.get(r, 'an unknown host')}" for r in missing[:4])
    lost = f"; not in it: {where}" if missing else "; all of its ranks are in it"
    return red(
        AREA,
        f"{kind} of ranks {', '.join(map(str, group))}: {'; '.join(errors)}{lost}",
        f"links between {', '.join(sorted(set(hosts.values()))) or 'its nodes'}: interface "
        "variables, firewall, hccn_tool (NPU) or nccl-tests (CUDA); then rows above",
    )


def _rank_report(text: bytes) -> RankReport:
    raw = json.loads(text)
    results = {kind: GroupResult(**result) for kind, result in raw["results"].items()}
    return RankReport(raw["host"], results)
