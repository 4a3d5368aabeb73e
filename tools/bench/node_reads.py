"""Counts what a node reads of a base checkpoint, and plans an export, without reading a byte.

    python tools/bench/node_reads.py                        # published layouts, half a minute
    python tools/bench/node_reads.py --cases qwen2.5-7b

A node needs the bytes that any of its ranks keeps. Columns of the first table, as multiples of
these:

alone    what its ranks ask for when each reads its own rectangles
pages    the same in pages of 4 KiB: a rectangle of some columns touches pages of others as well
shared   what they read when they share: each row once (mindspeed_rl/model_files)

The page cache of a node may answer some of the first two; shared needs none. The busiest rank is
the one that reads most of shared, as a multiple of the mean.

The second table is an export where all nodes see the directory: ranks that write at once, files,
the bytes of the rank that writes most, rounds, and the seconds of this machine's CPU in which a
rank plans them. The last line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import torch
from layout_texts import layouts_from_texts

from bench.jobs import ROOT, parser_of, print_result
from mindspeed_rl.core.boxes import Box
from mindspeed_rl.core.memory import EXPORT_BUFFER_BYTES, LOAD_BUFFER_BYTES
from mindspeed_rl.core.tables import aligned
from mindspeed_rl.model_files.export_plan import plan_export
from mindspeed_rl.model_files.loading import plan_reads
from mindspeed_rl.model_files.slices import Gathering, in_rounds, messages_of, slice_bytes
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.weight_layouts.base import pieces_of
from mindspeed_rl.weight_layouts.megatron import MegatronLayout
from mindspeed_rl.weights.executor import wire_dtype

CONFIGS = ROOT / "pretrain_scripts" / "models" / "configs"
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FilesCase:
    """A model of ``pretrain_scripts/models/configs``, a trainer as for inspect_plan.py, ranks."""

    model: str
    train: str
    ranks: int
    ranks_per_node: int = 16


CASES = {
    "qwen2.5-7b": FilesCase("qwen2.5-7b", "tp=4", 8, 8),
    "qwen3-30b-a3b": FilesCase("qwen3-30b-a3b", "tp=2,ep=8,etp=1", 16),
    "qwen3-30b-a3b-tp4": FilesCase("qwen3-30b-a3b", "tp=4,pp=2,ep=8,etp=1", 16, 8),
    "deepseek-v3": FilesCase(
        "deepseek-v3", "tp=4,pp=8,num_layer_list=7-7-8-8-8-8-8-7,ep=16,etp=1", 128
    ),
}


@lru_cache(maxsize=1 << 16)
def page_bytes(box: Box, shape: tuple[int, ...], item_bytes: int) -> int:
    """Return the bytes of the pages that a rectangle touches, counted from the tensor's first."""
    if box.size[1:] == shape[1:]:
        return box.num_elements * item_bytes
    row, first = item_bytes * shape[-1], item_bytes * box.lo[-1]
    last = first + item_bytes * box.size[-1] - 1
    pages: set[int] = set()
    for number in range(box.num_elements // box.size[-1]):
        start = number * row
        pages.update(range((start + first) // PAGE_BYTES, (start + last) // PAGE_BYTES + 1))
    return len(pages) * PAGE_BYTES


def types_of(layout: MegatronLayout) -> Mapping[str, torch.dtype]:
    """Return the element types of a checkpoint in bf16."""
    return {name: wire_dtype(layout.dtype_of(name), torch.bfloat16) for name in layout.hf_shapes}


def reads(layout: MegatronLayout, ranks_per_node: int) -> dict[str, float]:
    """Count what the first node reads."""
    types, node = types_of(layout), range(ranks_per_node)
    most = slice_bytes(LOAD_BUFFER_BYTES) // ranks_per_node
    queues = plan_reads(layout, node, types, most)
    by_rank = [sum(rows.num_bytes for rows in queues.get(rank, ())) for rank in node]
    alone = pages = 0
    for rank in node:
        for piece in (shard.piece for shard in pieces_of(layout, rank)):
            size = types[piece.hf_name].itemsize
            alone += piece.hf_box.num_elements * size
            pages += page_bytes(piece.hf_box, layout.shape_of(piece.hf_name), size)
    needed = needed_bytes(layout, node, types)
    return {
        "needed_bytes": needed,
        "alone": alone / needed,
        "pages": pages / needed,
        "shared": sum(by_rank) / needed,
        "busiest": max(by_rank) * ranks_per_node / sum(by_rank),
    }


def needed_bytes(layout: MegatronLayout, node: range, types: Mapping[str, torch.dtype]) -> int:
    """Return the bytes of elements that any rank of a node keeps, each once."""
    kept: dict[str, set[Box]] = {}
    for rank in node:
        for shard in pieces_of(layout, rank):
            kept.setdefault(shard.piece.hf_name, set()).add(shard.piece.hf_box)
    # Rectangles of one tensor are equal or disjoint.
    return sum(
        b.num_elements * types[name].itemsize for name, several in kept.items() for b in several
    )


def export(layout: MegatronLayout, ranks: int, ranks_per_node: int) -> dict[str, float]:
    """Plan an export as rank 0 does."""
    start = time.process_time()
    plan = plan_export(layout, torch.bfloat16, range(0, ranks, ranks), ranks_per_node)
    most, gathering = slice_bytes(EXPORT_BUFFER_BYTES), Gathering(layout, ranks_per_node)
    queues = plan.queues(most, {})
    rounds = in_rounds(queues, gathering.parts_of, most)
    for slices in rounds:
        messages_of(0, slices, gathering.parts_of, gathers=True)
    seconds = time.process_time() - start
    written = [sum(rows.num_bytes for rows in queue) for queue in queues.values()]
    return {
        "writers": len(written),
        "files": len(plan.files),
        "busiest_bytes": max(written),
        "rounds": len(rounds),
        "planning_s": seconds,
    }


def measure(name: str) -> dict[str, Any]:
    """Count one case."""
    case = CASES[name]
    config = json.loads((CONFIGS / f"{case.model}.json").read_text())
    config.pop("quantization_config", None)
    spec = spec_from_hf_config(config)
    layout, _ = layouts_from_texts(spec, case.train, "tp=1", case.ranks)
    types = types_of(layout)
    total = sum(prod(shape) * types[n].itemsize for n, shape in layout.hf_shapes.items())
    return {
        "case": name,
        "train": case.train,
        "ranks": case.ranks,
        "ranks_per_node": case.ranks_per_node,
        "weights_bytes": total,
        "reads": reads(layout, case.ranks_per_node),
        "export": export(layout, case.ranks, case.ranks_per_node),
    }


def main(args: argparse.Namespace) -> None:
    """Count and print."""
    results = [measure(name) for name in args.cases]
    rows = [["a node reads", "needs GB", "alone", "pages", "shared", "busiest rank"]]
    for r in results:
        found = r["reads"]
        figures = (f"{found[key]:.2f}" for key in ("alone", "pages", "shared", "busiest"))
        rows.append([r["case"], f"{found['needed_bytes'] / 1e9:.1f}", *figures])
    print("\n".join(aligned(rows)))
    rows = [["an export", "GB", "writers", "files", "busiest GB", "rounds", "planning s"]]
    for r in results:
        found = r["export"]
        counts = (
            str(found["writers"]),
            str(found["files"]),
            f"{found['busiest_bytes'] / 1e9:.1f}",
        )
        more = str(found["rounds"]), f"{found['planning_s']:.2f}"
        rows.append([r["case"], f"{r['weights_bytes'] / 1e9:.0f}", *counts, *more])
    print("\n".join(aligned(rows)))
    print_result("node_reads", cases=results)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    main(parser.parse_args())
