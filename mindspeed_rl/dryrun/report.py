"""A dry run in words and as JSON. Every number of it is predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mindspeed_rl.config.validate import RLPlan
from mindspeed_rl.dryrun.findings import Findings, RankClass
from mindspeed_rl.memory.owners import MemoryPhase, Owner

_GIB, _MIB = 2**30, 2**20
_SUGGESTED = 5


def lines(found: Findings) -> Iterator[str]:
    """The report for the terminal."""
    yield "dry run: everything below is predicted, nothing was measured"
    yield ""
    yield from _arithmetic(found)
    yield ""
    yield from _memory(found)
    if found.volume is not None:
        yield ""
        yield from _volume(found)
    yield ""
    yield from _seconds(found)
    yield ""
    yield from _verdict(found)


def _arithmetic(found: Findings) -> Iterator[str]:
    plan, work = found.plan, found.prediction.workload
    parallel = plan.parallel
    experts = plan.spec.moe is not None
    sharded = found.config.parallel.shards_sequence
    layout = parallel.describe(experts=experts, sequence_parallel=sharded)
    yield f"layout: {parallel.world} ranks = {layout}"
    if isinstance(plan, RLPlan):
        yield f"engines: {plan.engine.describe(experts=experts)}"
        yield from plan.batch.lines(parallel.dp, plan.engine.num_replicas)
    yield (
        f"training: {work.num_micro_batches} micro-batches of {work.tokens} tokens per rank and "
        "optimizer step"
    )


def _table(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        yield "  " + "  ".join(cells)


@dataclass(frozen=True, slots=True)
class _Unit:
    """The unit of a report: GiB, or MiB for models of tests."""

    name: str
    num_bytes: int

    @classmethod
    def of(cls, found: Findings) -> _Unit:
        return cls("GiB", _GIB) if found.peak.num_bytes >= _GIB else cls("MiB", _MIB)

    def cell(self, size: int) -> str:
        return f"{size / self.num_bytes:.3f}" if size else "-"

    def text(self, size: int) -> str:
        return f"{size / self.num_bytes:.2f} {self.name}"


def fullest_classes(found: Findings) -> Iterable[RankClass]:
    """The first and the last stage, and the one with the peak."""
    peak = next(c for c in found.classes if c.first <= found.peak.rank <= c.last)
    chosen = (found.classes[0], peak, found.classes[-1])
    return {c.first: c for c in chosen}.values()


def _memory(found: Findings) -> Iterator[str]:
    machine, assumptions = found.machine, found.prediction.assumptions
    unit = _Unit.of(found)
    yield (
        f"memory, {unit.name}; machine {machine.name}; offload during rollouts: "
        f"{assumptions.offload.value} ({found.offload_reason})"
    )
    yield (
        f"assumed: {machine.kernels.value} kernels, expert imbalance "
        f"{assumptions.train_imbalance:g}, {machine.reserved_gib:g} GiB reserved"
    )
    if assumptions.swap_parts:
        yield (
            "optimizer state: on the host, moved through the device by MindSpeed in "
            f"{assumptions.swap_parts} parts (--swap-optimizer); a run without MindSpeed refuses it"
        )
    elif found.config.ascend.swap_optimizer:
        yield (
            f"--swap-optimizer has no effect on {machine.platform}, where a run refuses it; take "
            "--rl-offload optimizer"
        )
    if found.groups:
        sizes = found.prediction.group_bytes(0)
        named = ", ".join(
            f"{name} {sizes[name] / 2**20:.0f} MiB ({num} ranks)"
            for name, num in found.groups.items()
        )
        yield f"communicators of rank 0, {sum(sizes.values()) / 2**20:.0f} MiB: {named}"
    for ranks in fullest_classes(found):
        yield f"ranks {ranks.first}-{ranks.last}:"
        phases = list(ranks.table)
        owners = [o for o in Owner if any(o in ranks.table[p] for p in phases)]
        rows = [["owner", *(phase.value for phase in phases)]]
        rows += [[o.value, *(unit.cell(ranks.table[p].get(o, 0)) for p in phases)] for o in owners]
        rows.append(["sum", *(unit.cell(sum(ranks.table[p].values())) for p in phases)])
        yield from _table(rows)


def _volume(found: Findings) -> Iterator[str]:
    assert found.volume is not None
    machine = found.machine
    yield "weight update, GB (planned for some ranks):"
    rows = [["rank", "in", "out", "kept", "in from other nodes", "senders"]]
    for t in found.volume.ranks:
        sizes = (t.receive_bytes, t.send_bytes, t.copy_bytes, t.inter_node_receive_bytes)
        rows.append([str(t.rank), *(f"{s / 1e9:.3f}" for s in sizes), str(t.num_senders)])
    yield from _table(rows)
    yield (
        f"  {found.volume.seconds:.3g} s for the busiest: {machine.within_node_gb_s:g} GB/s within "
        f"a node, {machine.between_nodes_gb_s:g} between, x {machine.link_efficiency:g}"
    )


def _seconds(found: Findings) -> Iterator[str]:
    total = sum(row.seconds for row in found.seconds)
    yield f"seconds of a step, estimated from the machine file: {total:.4g}"
    for row in found.seconds:
        yield f"  {row.phase:<10} {row.seconds:>9.4g}  = {row.formula}"


def _verdict(found: Findings) -> Iterator[str]:
    peak, budget, unit = found.peak, found.budget_bytes, _Unit.of(found)
    yield (
        f"peak: {unit.text(peak.num_bytes)} in phase {peak.phase.value} on rank {peak.rank}; "
        f"{budget / _GIB:.2f} GiB may be used: {'fits' if found.fits else 'DOES NOT FIT'}"
    )
    if not found.suggestions:
        return
    yield "single changes that lower this peak, each predicted anew:"
    for change in found.suggestions[:_SUGGESTED]:
        after = change.peak
        yield (
            f"  {change.flags}: saves {unit.text(change.saved_bytes)}, then "
            f"{unit.text(after.num_bytes)} in {after.phase.value}"
            + ("" if after.num_bytes <= budget else ", still too much")
        )


def as_json(found: Findings) -> dict[str, Any]:
    """Everything, in bytes and seconds."""
    return {
        "predicted": True,
        "world": found.prediction.world,
        "machine": asdict(found.machine),
        "assumptions": {
            "kernels": found.machine.kernels.value,
            "offload": found.prediction.assumptions.offload.value,
            "offload_reason": found.offload_reason,
            "train_imbalance": found.prediction.assumptions.train_imbalance,
            "rollout_imbalance": found.prediction.assumptions.rollout_imbalance,
            "swap_optimizer": bool(found.prediction.assumptions.swap_parts),
        },
        "rank_classes": [
            {
                "first_rank": c.first,
                "last_rank": c.last,
                "bytes": {
                    phase.value: {owner.value: size for owner, size in table.items()}
                    for phase, table in c.table.items()
                },
            }
            for c in found.classes
        ],
        "communicators": dict(found.groups),
        "peak": {
            "rank": found.peak.rank,
            "phase": MemoryPhase(found.peak.phase).value,
            "bytes": found.peak.num_bytes,
        },
        "budget_bytes": found.budget_bytes,
        "fits": found.fits,
        "weight_update": None
        if found.volume is None
        else {
            "seconds": found.volume.seconds,
            "ranks": [asdict(traffic) for traffic in found.volume.ranks],
        },
        "seconds": [asdict(row) for row in found.seconds],
        "suggestions": [
            {"flags": s.flags, "saved_bytes": s.saved_bytes, "peak_bytes": s.peak.num_bytes}
            for s in found.suggestions
        ],
    }
