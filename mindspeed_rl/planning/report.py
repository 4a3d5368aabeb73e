"""Formats the findings of a dry run, all of which are predicted, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.memory import LOAD_BUFFER_BYTES, MemoryOwner
from mindspeed_rl.core.ranks import counted, rank_ranges
from mindspeed_rl.core.tables import aligned
from mindspeed_rl.flag_checks.deltas import cost_of_deltas
from mindspeed_rl.packing.micro_batches import SIGMA
from mindspeed_rl.planning.findings import Findings
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.run_plan import RLPlan

_GIB, _MIB = 2**30, 2**20


def lines(found: Findings) -> Iterator[str]:
    """Yield the lines of the report for the terminal."""
    yield "dry run: everything below is predicted, nothing was measured"
    for part in (_arithmetic, _memory, _volume, _seconds, _verdict):
        if text := list(part(found)):
            yield from ("", *text)


def _arithmetic(found: Findings) -> Iterator[str]:
    prediction = found.prediction
    plan, work = prediction.plan, prediction.workload
    parallel, experts = plan.parallel, bool(plan.spec.expert_layers)
    sharded = prediction.config.parallel.shards_sequence
    layout = parallel.describe(experts=experts, sequence_parallel=sharded)
    yield f"layout: {counted(parallel.world, 'rank')} = {layout}"
    if isinstance(plan, RLPlan):
        yield f"engines: {plan.engine.describe(experts=experts)}"
        yield from plan.batch.lines(parallel.dp, plan.engine.num_replicas)
    yield (
        f"worst case: {work.num_micro_batches} micro-batches of {work.tokens} tokens per rank and "
        "optimizer step, where every sequence is as long as it may be"
    )
    packing, config = found.packing, prediction.config
    equal = isinstance(config, RLRunConfig) and config.benchmark.active
    lengths = "equal lengths" if equal else f"drawn lengths (log-normal, sigma {SIGMA})"
    # Rows on different numbers of ranks compare by what each rank has of them.
    row = f"{packing.longest_row} tokens"
    if packing.samples_by_ranks:
        row = f"{packing.tokens_of_rank} tokens on a context-parallel rank"
    yield (
        f"packing of {lengths}, mean {packing.mean_length:.0f}{_own_mean(found)}: "
        f"{packing.num_micro_batches} micro-batches of up to {row}, "
        f"{1 / packing.real_share:.3f} tokens per real token, with padding"
    )
    if packing.samples_by_ranks:
        counts = (f"{count} on {ranks}" for ranks, count in packing.samples_by_ranks.items())
        yield f"samples by the context-parallel ranks that share them: {', '.join(counts)}"


def _own_mean(found: Findings) -> str:
    """Return how to give the mean length of sequences, where it is not given and would count."""
    config = found.prediction.config
    given = config.dry_run.rl_dry_run_mean_length or config.dry_run.rl_dry_run_mean_response_length
    if given or not isinstance(config, RLRunConfig) or config.benchmark.active:
        return ""
    return " (a third of the longest; --rl-dry-run-mean-response-length N gives yours)"


def _unit(found: Findings) -> tuple[str, int]:
    """Return name and bytes of the unit of sizes: GiB, or MiB for the small models of tests."""
    return ("GiB", _GIB) if found.peak.num_bytes >= _GIB else ("MiB", _MIB)


def _of_changes(found: Findings) -> Iterator[str]:
    """Yield the line about the host memory of ``--reshard-deltas``, where it takes any."""
    prediction, machine = found.prediction, found.prediction.machine
    sent, asleep = map(max, zip(*map(prediction.delta_host_bytes, found.tables), strict=True))
    if sent or asleep:
        ranks = min(machine.ranks_per_node, prediction.world)
        yield (
            f"changes of weights take up to {sent / _GIB:.2f} GiB of the host for each rank to "
            f"know what was sent, and {asleep / _GIB:.2f} GiB for an engine that sleeps, "
            f"{(sent + asleep) * ranks / _GIB:.1f} GiB of a node (--reshard-deltas)"
        )


def _memory(found: Findings) -> Iterator[str]:
    prediction, machine = found.prediction, found.prediction.machine
    name, unit = _unit(found)
    yield (
        f"memory, {name}; machine {machine.name}; offload during rollouts: "
        f"{prediction.offload.value} ({found.offload_reason})"
    )
    if prediction.order:
        yield prediction.order.line()
    yield from found.cache_lines
    yield (
        f"assumed: fused kernels, expert imbalance {prediction.imbalance:g}, "
        f"{machine.reserved_gib:g} GiB reserved"
    )
    if prediction.swap_parts:
        yield (
            "optimizer state: on the host, moved through the device by MindSpeed in "
            f"{prediction.swap_parts} parts (--swap-optimizer); a run without MindSpeed refuses it"
        )
    if isinstance(prediction.plan, RLPlan):
        yield decode_line(prediction)
    if prediction.buffers and (line := prediction.buffers.line()):
        yield line
    if sizes := prediction.group_bytes(0):
        groups = prediction.groups(0)
        named = ", ".join(
            f"{name} {size / _MIB:.0f} MiB ({counted(len(groups[name]), 'rank')})"
            for name, size in sizes.items()
        )
        yield f"communicators of rank 0, {sum(sizes.values()) / _MIB:.0f} MiB: {named}"
    if prediction.saves:
        host = max(prediction.save_host_bytes(rank) for rank in found.tables)
        yield (
            f"a save takes {host / _GIB:.1f} GiB of the host for each rank, "
            f"{host * machine.ranks_per_node / _GIB:.0f} GiB of a node of {machine.ranks_per_node}"
        )
    yield f"reading weights takes up to {LOAD_BUFFER_BYTES // _MIB} MiB of the host for each rank"
    if copies := max(prediction.peer_copies(rank) for rank in found.tables):
        ranks = min(machine.ranks_per_node, prediction.world)
        yield (
            f"copies for restarts take {copies / _GIB:.2f} GiB of shared memory for each rank, "
            f"{copies * ranks / _GIB:.1f} GiB of a node (--peer-checkpoint-steps)"
        )
    yield from _of_changes(found)
    for rank in sorted({0, found.peak.rank, max(found.tables)}):
        stage = range(rank, rank + found.ranks_per_stage)
        yield f"{'ranks' if len(stage) > 1 else 'rank'} {rank_ranges(stage)}:"
        tables = found.tables[rank].values()
        rows = [["owner", *(phase.value for phase in found.tables[rank])]]
        for owner in (o for o in MemoryOwner if any(o in table for table in tables)):
            sizes_of = (table.get(owner, 0) for table in tables)
            rows.append([owner.value, *(f"{s / unit:.3f}" if s else "-" for s in sizes_of)])
        rows.append(["sum", *(f"{sum(table.values()) / unit:.3f}" for table in tables)])
        yield from (f"  {line}" for line in aligned(rows))


def decode_line(prediction: MemoryPrediction) -> str:
    """Describe how the engine of an RL run decodes, and what its graphs are assumed to take."""
    tuning, why = prediction.tuning
    mode, reason = tuning.rollout_graph_mode, f" ({why})" if why else ""
    if mode == "eager":
        return f"decode: eager, operator by operator{reason}"
    count, each = prediction.num_graphs, prediction.machine.graph_mib
    return f"decode: {mode} graphs of {count} sizes{reason}, {each:g} MiB each assumed"


def _volume(found: Findings) -> Iterator[str]:
    if not found.volume:
        return
    yield "weight update, GB (planned for some ranks):"
    rows = [["rank", "in", "out", "kept", "in from other nodes", "senders"]]
    for t in found.volume:
        sizes = (t.receive_bytes, t.send_bytes, t.copy_bytes, t.inter_node_receive_bytes)
        rows.append([str(t.rank), *(f"{s / 1e9:.3f}" for s in sizes), str(t.num_senders)])
    yield from (f"  {line}" for line in aligned(rows))
    config, platform = found.prediction.config, found.prediction.machine.platform
    deltas = config.rollout.reshard_deltas if isinstance(config, RLRunConfig) else "off"
    if line := cost_of_deltas(deltas, platform):
        yield f"  {line}"
    if found.handover:
        yield from found.handover.lines(found.seconds.whole.seconds if found.seconds else None)


def _seconds(found: Findings) -> Iterator[str]:
    step = found.seconds
    if step is None:
        name = found.prediction.machine.name
        yield f"seconds of a step: not predicted, no published run was fitted for machine {name}"
        return
    yield "seconds of a step with these lengths, the same as h:mm:ss, and their range:"
    rows = [
        [
            *(phase.phase, f"{phase.seconds:.1f}", str(timedelta(seconds=round(phase.seconds)))),
            f"{phase.low:.1f} to {phase.high:.1f}",
        ]
        for phase in (*step.phases, step.whole)
    ]
    yield from (f"  {line}" for line in aligned(rows))
    yield f"  {step.source}"
    if isinstance(found.prediction.plan, RLPlan):
        yield "  not counted: prefill, rewards, reshard, offloading"


def _verdict(found: Findings) -> Iterator[str]:
    peak, budget = found.peak, found.budget_bytes
    name, unit = _unit(found)
    yield (
        f"peak: {peak.num_bytes / unit:.2f} {name} in phase {peak.phase.value} on rank "
        f"{peak.rank}; {budget / _GIB:.2f} GiB may be used: "
        f"{'fits' if found.fits else 'DOES NOT FIT'}"
    )
    if any(change.number == 1 for change in found.suggestions):
        yield "single changes that would help, each with its own prediction:"
    for change in found.suggestions:
        after = change.peak
        verdict = "fits" if after.num_bytes <= budget else "still too much"
        if change.number > 1:
            yield f"{change.number} changes together:"
        elif verdict != "fits" and change.mended:
            mended = ", ".join(phase.value for phase in change.mended)
            verdict += f", but {mended} {'fits' if len(change.mended) == 1 else 'fit'}"
        yield (
            f"  {change.flags}: {after.num_bytes / unit:.2f} {name} in phase {after.phase.value}, "
            f"{verdict}"
        )


def _execution(prediction: MemoryPrediction) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(prediction.plan, RLPlan):
        mode = prediction.tuning[0].rollout_graph_mode
        found = {"graph_mode": mode, "graphs": prediction.num_graphs}
    if buffers := prediction.buffers:
        found["hccl_buffsize_mb"] = buffers.process_mb
        found["hccl_buffsize_needed_mb"] = buffers.needed_mb
    return found


def as_json(found: Findings) -> dict[str, Any]:
    """Return all findings as a JSON object, with sizes in bytes."""
    prediction = found.prediction
    return {
        "predicted": True,
        "world": prediction.world,
        "machine": asdict(prediction.machine),
        "assumptions": {
            "offload": prediction.offload.value,
            "offload_reason": found.offload_reason,
            "offload_order": asdict(prediction.order) if prediction.order else None,
            "expert_imbalance": prediction.imbalance,
            "swap_optimizer": bool(prediction.swap_parts),
            **_execution(prediction),
        },
        "rank_classes": [
            {"first_rank": rank, "last_rank": rank + found.ranks_per_stage - 1, "bytes": table}
            for rank, table in found.tables.items()
        ],
        "communicators": {n: len(prediction.groups(0)[n]) for n in prediction.group_bytes(0)},
        "save_host_bytes": max(prediction.save_host_bytes(r) for r in found.tables),
        "delta_host_bytes": max(sum(prediction.delta_host_bytes(r)) for r in found.tables),
        "peer_copy_bytes": max(prediction.peer_copies(r) for r in found.tables),
        "peak": {
            "rank": found.peak.rank,
            "phase": found.peak.phase,
            "bytes": found.peak.num_bytes,
        },
        "packing": asdict(found.packing),
        "seconds": asdict(found.seconds) if found.seconds else None,
        "budget_bytes": found.budget_bytes,
        "fits": found.fits,
        "weight_update": [asdict(traffic) for traffic in found.volume],
        "handover": found.handover.as_json() if found.handover else None,
        "suggestions": [
            {"flags": s.flags, "peak_bytes": s.peak.num_bytes} for s in found.suggestions
        ],
    }
