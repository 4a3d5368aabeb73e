"""Checks a checkpoint, or a config alone, against the weight table of its family.

Every key must be in the table, every element exactly once in the training and the rollout layout,
except declared padding. Names and shapes are compared and weights never read, so any size takes
seconds. Exit status: 0 no findings, 1 findings, 2 an unsupported input.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import needs_environment  # noqa: F401
from layout_texts import ROLLOUT_KEYS, TRAIN_KEYS, config_from_texts, layouts_from_texts

from mindspeed_rl.checkpoint.names import BUFFERS, mtp_tensors
from mindspeed_rl.core.boxes import Box, Shape
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.tables import aligned
from mindspeed_rl.models.hf_files import INDEX, read_index
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.safetensors_files import safetensors_entries
from mindspeed_rl.models.spec import ModelSpec, read_hf_config
from mindspeed_rl.models.tensors import (
    TensorGroup,
    nearest_group,
    num_parameters,
    pattern_of,
    tensor_groups,
)
from mindspeed_rl.weight_layouts.base import Piece, TableLayout

# --- comparison of a checkpoint with the table --------------------------------------------------


def tensor_shapes(directory: str | Path) -> dict[str, Shape | None]:
    """Read names and shapes of a checkpoint from its index and its safetensors headers.

    A shape is ``None`` when the index names a file that is missing.

    Raises:
        UsageError: Neither an index nor a safetensors file, or an unreadable one.
    """
    root = Path(directory)
    shapes: dict[str, Shape | None] = {}
    if (root / INDEX).is_file():
        shapes = dict.fromkeys(read_index(root / INDEX))
    files = sorted(root.glob("*.safetensors"))
    if not shapes and not files:
        raise UsageError(f"--hf-checkpoint {root}: neither {INDEX} nor safetensors files are there")
    for file in files:
        shapes |= {name: entry.shape for name, entry in safetensors_entries(file).items()}
    if (root / INDEX).is_file():
        for name, file_name in read_index(root / INDEX).items():
            if shapes[name] is None and (root / file_name).is_file():
                raise UsageError(f"{root / file_name}: lacks {name}, which {INDEX} says is there")
    return shapes


def without_extras(spec: ModelSpec, names: Iterable[str]) -> tuple[list[str], Counter[str]]:
    """Return the names that a table must know, and the number of other names by kind.

    The others are tensors that no layout holds and that loading leaves out: multi-token-prediction
    layers, old buffers of rotary frequencies, and the head of a tied model.
    """
    names = list(names)
    mtp = set(mtp_tensors(spec, names))
    kept: list[str] = []
    extras: Counter[str] = Counter()
    for name in names:
        if name in mtp:
            extras["multi-token-prediction layers"] += 1
        elif name.endswith(BUFFERS):
            extras["rotary frequencies"] += 1
        elif spec.tie_embeddings and name == "lm_head.weight":
            extras["head of a tied model"] += 1
        else:
            kept.append(name)
    return kept, extras


def check_tensors(spec: ModelSpec, shapes: Mapping[str, Shape | None]) -> list[str]:
    """List the differences between the tensors of a checkpoint and the table of its family.

    There is one line per kind of tensor: unknown keys with the nearest row, missing keys with their
    row, and shapes that the config does not imply.
    """
    groups = tensor_groups(spec)
    known = {name: group for group in groups for name in group.names()}
    unknown = [name for name in without_extras(spec, shapes)[0] if name not in known]
    findings = [
        f"{_count(names)}: not in the table; nearest row {_row(nearest_group(pattern, groups))}"
        for pattern, names in _by_pattern(unknown).items()
    ]
    for group in groups:
        present = [name for name in group.names() if name in shapes]
        if absent := [name for name in group.names() if name not in shapes]:
            findings.append(f"{_count(absent)}: missing from the checkpoint; row {_row(group)}")
        wrong = [name for name in present if shapes[name] not in (None, group.shape)]
        if wrong:
            findings.append(
                f"{_count(wrong)}: shape {shapes[wrong[0]]}, config.json implies {group.shape}; "
                f"row {_row(group)}"
            )
    return findings


def _row(group: TensorGroup) -> str:
    return f"{group.row} <- {group.pattern}"


def _count(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(pattern_of(name), []).append(name)
    return found


def check_checkpoint(spec: ModelSpec, directory: str | Path) -> list[str]:
    """Run :func:`check_tensors` on a directory, and print what it leaves out.

    Raises:
        UsageError: A file is unreadable.
    """
    shapes = tensor_shapes(directory)
    for kind, count in without_extras(spec, shapes)[1].items():
        print(f"note: {count} tensors are left out: {kind}")
    if unseen := sum(shape is None for shape in shapes.values()):
        print(f"note: {unseen} tensors are in files that are not here: only names are checked")
    return check_tensors(spec, shapes)


def summary(spec: ModelSpec) -> list[str]:
    """Return the lines of a table of a model's tensors, and their total."""
    groups = tensor_groups(spec)
    rows = [(g.pattern, g.num_tensors, g.num_parameters, g.num_bytes) for g in groups]
    total = sum(g.num_tensors for g in groups), num_parameters(spec)
    rows.append(("total", *total, sum(g.num_bytes for g in groups)))
    title = ["HF tensors", "tensors", "parameters", "bytes in bf16"]
    return aligned([title, *([name, str(n), f"{p:,}", f"{b:,}"] for name, n, p, b in rows)])


# --- comparison of a layout with the table -----------------------------------------------------


def check_layout(layout: TableLayout) -> list[str]:
    """List the errors of a layout: elements that no shard or two shards hold, on either side.

    Every element of every HF tensor must be held by exactly one shard that is no replica. Every
    element of every rank's parameters must be filled by exactly one piece, except declared padding.
    """
    side = type(layout).__name__
    expected = {n: g.shape for g in tensor_groups(layout.spec) for n in g.names()}
    findings = []
    if dict(layout.hf_shapes) != expected:
        differing = sorted(set(layout.hf_shapes.items()) ^ set(expected.items()))
        findings.append(f"{side}: its tensors are not the table's, first {differing[0]}")
    pieces_of_ranks: dict[range, list[Piece]] = {}
    for name, shape in layout.hf_shapes.items():
        shards = layout.shards(name)
        boxes = tuple(s.piece.hf_box for s in shards if not s.is_replica)
        if problem := _misfit(shape, boxes, 0):
            findings.append(f"{side}: {name} {shape} {problem}")
        for shard in shards:
            pieces_of_ranks.setdefault(shard.owner_ranks, []).append(shard.piece)
    for rank in representatives(layout):
        findings += _check_rank(layout, rank, pieces_of_ranks, side)
    return findings


def representatives(layout: TableLayout) -> Iterator[int]:
    """Yield one rank of each set of ranks that hold exactly the same pieces."""
    sets = {shard.owner_ranks for name in layout.hf_shapes for shard in layout.shards(name)}
    seen = set()
    for rank in range(1 + max(owner_ranks[-1] for owner_ranks in sets)):
        held = frozenset(owner_ranks for owner_ranks in sets if rank in owner_ranks)
        if held not in seen:
            seen.add(held)
            yield rank


def _check_rank(
    layout: TableLayout, rank: int, pieces_of_ranks: Mapping[range, list[Piece]], side: str
) -> Iterator[str]:
    boxes: dict[str, list[Box]] = {}
    for owner_ranks, pieces in pieces_of_ranks.items():
        if rank in owner_ranks:
            for piece in pieces:
                boxes.setdefault(piece.param, []).append(piece.view.stored_box(piece.param_box))
    padding = layout.local_padding(rank)
    shapes = layout.local_shapes(rank)
    for param in boxes.keys() - shapes.keys():
        yield f"{side}: rank {rank} has no parameter {param}, but pieces of it"
    for param, shape in shapes.items():
        if problem := _misfit(shape, tuple(boxes.get(param, ())), padding[param]):
            yield f"{side}: rank {rank}: parameter {param} {shape} {problem}"


@lru_cache(maxsize=65536)
def _misfit(shape: Shape, boxes: tuple[Box, ...], num_padding: int) -> str:
    """Say why boxes do not fill a tensor exactly once, except for padding; empty if they do."""
    whole = Box.whole(shape)
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.lo):
        if len(box.lo) != len(shape) or whole.intersect(box) != box:
            return f"is left by {box}"
        open_boxes = [o for o in open_boxes if o.lo[0] + o.size[0] > box.lo[0]]
        for other in open_boxes:
            if both := box.intersect(other):
                return f"is filled twice at {both}"
        open_boxes.append(box)
    missing = whole.num_elements - sum(box.num_elements for box in boxes)
    if missing != num_padding:
        return f"has {missing} elements that nothing fills; declared padding: {num_padding}"
    return ""


# --- the command --------------------------------------------------------------------------------


def _read_config(args: argparse.Namespace) -> dict[str, Any]:
    if not args.hf_config:
        return read_hf_config(args.hf_checkpoint)
    config = read_hf_config(args.hf_config, or_file=True, flag="--hf-config")
    if config.pop("quantization_config", None):
        print("note: weights are quantised; sizes are those of the converted checkpoint")
    return config


def _layouts(spec: ModelSpec, args: argparse.Namespace) -> Iterator[TableLayout]:
    """Yield the layouts of trainer and engine."""
    config = config_from_texts(args.train, args.rollout)
    train, rollout = config.parallel, config.rollout
    model_parallel = train.tensor_model_parallel_size * train.pipeline_model_parallel_size
    world = args.world or math.lcm(
        model_parallel * train.context_parallel_size,
        rollout.rl_inference_tensor_model_parallel_size * rollout.rollout_dp,
    )
    source, target = layouts_from_texts(spec, args.train, args.rollout, world)
    yield source
    yield replace(target, expert_multiple=args.pad_experts)


def main() -> int:
    """Parse the flags, check the layouts, print the findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hf-checkpoint", metavar="DIR", help="Safetensors or their index.")
    parser.add_argument("--hf-config", metavar="FILE", help="Instead of DIR/config.json.")
    parser.add_argument("--train", default="", help=f"tp=2,pp=4,...; keys: {', '.join(TRAIN_KEYS)}")
    parser.add_argument("--rollout", default="", help=f"tp=8,...; keys: {', '.join(ROLLOUT_KEYS)}")
    parser.add_argument("--world", type=int, help="Ranks; by default as few as possible.")
    parser.add_argument(
        "--pad-experts", type=int, default=1, help="Multiple of an expert's channels on a rank."
    )
    args = parser.parse_args()
    if not (args.hf_checkpoint or args.hf_config):
        parser.error("give --hf-checkpoint DIR, --hf-config FILE, or both")
    findings: list[str] = []
    try:
        spec = spec_from_hf_config(_read_config(args))
        if args.hf_checkpoint:
            findings += check_checkpoint(spec, args.hf_checkpoint)
        for layout in _layouts(spec, args):
            findings += check_layout(layout)
    except (OSError, UsageError) as error:
        parser.error(str(error))
    print("\n".join(summary(spec)))
    for finding in findings:
        print(f"FINDING: {finding}")
    print(f"{len(findings)} findings" if findings else "every key and element exactly once")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
