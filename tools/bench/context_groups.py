"""Compares static and hybrid context parallelism on drawn lengths, by plans alone. One core.

    python tools/bench/context_groups.py

Plans of one optimizer step for the recipes, each with 4 and 8 context-parallel ranks:

static  all context-parallel ranks share every row
hybrid  --hybrid-context-parallel: short rows on few ranks, long ones on many
floor   nothing but the tokens of the samples, no exchange, and all ranks have equal work

``travel`` is the tokens that travel per real one. ``exchanged`` is the bytes of keys and values
that an optimizer step sends between the ranks that share a row: gathered in the forward pass, their
gradients summed in the backward pass, in bf16, in GB over all ranks. ``busiest`` is the work of the
busiest rank over the mean of all ranks. ``time`` is the end of the last rank over the floor, if
ranks wait only where they must. Both are in operations, and the exchange counts as in the plan. A
world that is too small for the layout is made larger. The last line is RESULT and a JSON object.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401

from bench.jobs import parser_of, print_result
from bench.packing import CASES, Drawn, flags_of
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.layout import num_chunks, round_up
from mindspeed_rl.core.tables import aligned
from mindspeed_rl.models.flops import context_values
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.packing.context_groups import SharedRow
from mindspeed_rl.packing.micro_batches import (
    MicroBatchPlan,
    PackingRules,
    drawn_lengths,
    real_share,
)
from mindspeed_rl.planning.run_plan import RLPlan, run_packing
from mindspeed_rl.planning.suggestions import plan_of

SIZES = (4, 8)
_BYTES = 2 * 2  # bf16, keys and values forwards and their gradients backwards
_COLUMNS = ("travel", "exchanged", "busiest", "time")


def measure(case: Drawn, cp: int) -> dict[str, dict[str, float]]:
    """Plan one optimizer step with ``cp`` context-parallel ranks, static and hybrid."""
    flags = [*flags_of(case), "--context-parallel-size", str(cp), "--hybrid-context-parallel"]
    config = parse(RLRunConfig, flags, "bench").config
    sizes = (
        config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    )
    world = max(config.dry_run.rl_world_size, 2 * sizes * cp)
    plan = plan_of(config, world)
    assert isinstance(plan, RLPlan)
    longest = config.rollout.rollout_max_response_length
    responses = drawn_lengths(plan.batch.samples_per_update, case.response, longest)
    lengths = [case.prompt + n for n in responses]
    rules = run_packing(config, plan)
    static = replace(rules, context_sizes=(cp,))
    return {
        "static": figures_of(static.assign(lengths), rules, lengths, plan.spec),
        "hybrid": figures_of(rules.assign(lengths), rules, lengths, plan.spec),
    }


def figures_of(
    plan: MicroBatchPlan, rules: PackingRules, lengths: Sequence[int], spec: ModelSpec
) -> dict[str, float]:
    """Return what a plan costs, by the names of the columns."""
    context = rules.context_rules(lengths)
    rows = shared_rows(plan, context.cp)
    work = [[0.0] * context.cp for _ in rows]
    sent = 0
    for own, micro_batches in zip(work, rows, strict=True):
        for row in (row for micro in micro_batches for row in micro):
            padded = [round_up(lengths[i], num_chunks(row.size)) for i in row.samples]
            sent += sum(padded) * (row.size - 1)
            for rank in row.ranks:
                own[rank] += context.work(row.samples, row.size, lengths)
    flat = [w for own in work for w in own]
    floor = sum(map(rules.cost.of, lengths)) / len(flat)
    return {
        "travel": 1 / real_share([plan], lengths),
        "exchanged": sent * context_values(spec) * _BYTES / 1e9,
        "busiest": max(flat) * len(flat) / sum(flat),
        "time": context.finish(rows, lengths) / floor,
        "micro_batches": plan.num_micro_batches,
    }


def shared_rows(plan: MicroBatchPlan, cp: int) -> list[list[tuple[SharedRow, ...]]]:
    """Return the rows of a plan by data-parallel rank and micro-batch."""
    found = []
    for dp, assigned in enumerate(plan.assignment):
        micro: list[list[SharedRow]] = [[] for _ in range(plan.num_micro_batches)]
        for number, samples in enumerate(assigned):
            if plan.places is None:
                micro[number].append(SharedRow(samples, 0, cp))
            else:
                place = plan.places[dp][number]
                micro[place.micro_batch].append(SharedRow(samples, place.first, place.size))
        found.append([tuple(rows) for rows in micro])
    return found


def main() -> None:
    """Print the table."""
    parser_of(__doc__).parse_args()
    results = {
        f"{name}, CP {cp}": measure(case, cp) for name, case in CASES.items() for cp in SIZES
    }
    header = ["", *(f"{c} {kind}" for c in _COLUMNS for kind in ("static", "hybrid"))]
    rows = [header]
    for name, found in results.items():
        figures = [found[kind][c] for c in _COLUMNS for kind in ("static", "hybrid")]
        rows.append([name, *(f"{x:.0f}" if x >= 100 else f"{x:.3f}" for x in figures)])
    rows.append(["floor", *("1" if c != "exchanged" else "0" for c in _COLUMNS for _ in range(2))])
    print("\n".join(aligned(rows)))
    print_result("context_groups", **results)


if __name__ == "__main__":
    main()
