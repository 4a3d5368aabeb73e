"""Races the reshard against gathering whole tensors, on gloo ranks of this machine.

    python tools/bench/reshard.py                       # two cases on 4 ranks, about a minute
    python tools/bench/reshard.py --cases deepseek-v3 --ranks 8

direct   ours: every rank receives only what its engine lacks, point to point
gather   the usual way: all shards of a replica of the trainer are broadcast to all of its ranks,
         many at a time, and every engine rank cuts its part out of whole tensors

Below are the seconds of the proofs that the engine's weights are the trainer's, of all rows and of
a sample, and what share of the seconds of direct they are.

Models have two layers of real shape and a vocabulary of 1024. The ways alternate in one run, and
after the last run of each the engine's weights are compared with the HF tensors bit by bit. Seconds
are medians. Received bytes are those over the wire, of all ranks and of the rank that receives the
most. The floor is the largest number of bytes that a rank's engine needs and its trainer lacks. The
last line is RESULT and a JSON object. tools/inspect_plan.py counts bytes for any model and number
of ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import torch
import torch.distributed as dist
from layout_texts import layouts_from_texts
from reshard_figures import rank_floor

from bench.jobs import ROOT, parser_of, print_result, spawn
from mindspeed_rl.core.boxes import Box
from mindspeed_rl.core.layout import round_up
from mindspeed_rl.core.tables import aligned
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.weight_layouts.base import Piece, ShardLayout, locate, pieces_of
from mindspeed_rl.weight_layouts.megatron import MegatronLayout
from mindspeed_rl.weights.exchange import Params
from mindspeed_rl.weights.executor import Resharder, wire_dtype
from mindspeed_rl.weights.traffic import element_bytes_of
from mindspeed_rl.weights.transports import make_transport
from mindspeed_rl.weights.verify import WeightVerifier

CONFIGS = ROOT / "pretrain_scripts" / "models" / "configs"
DTYPE = torch.bfloat16
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class ReshardCase:
    """A model and its layouts.

    Attributes:
        model: Name of a config in ``pretrain_scripts/models/configs``.
        changes: Keys of the config that replace the published ones.
        train: Text for ``--train`` of inspect_plan.py, by number of ranks.
        rollout: Text for ``--rollout`` of inspect_plan.py, by number of ranks.
        experts_per_rank: Number of routed experts of a layer per rank; 0: dense.
    """

    model: str
    changes: Mapping[str, Any]
    train: Mapping[int, str]
    rollout: Mapping[int, str]
    experts_per_rank: int = 0


_DENSE = {4: "tp=2,pp=2", 8: "tp=4,pp=2"}, {4: "tp=2", 8: "tp=2"}
_EXPERTS = (
    {4: "tp=2,pp=2,ep=2,etp=1", 8: "tp=4,pp=2,ep=4,etp=1"},
    {4: "tp=2,dp=2,ep=4", 8: "tp=2,dp=4,ep=8"},
)
_SLICED = _EXPERTS[0], {4: "tp=4", 8: "tp=8"}
_FLAT: dict[str, Any] = {
    "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
    "num_experts_per_tok": 2,
}  # fmt: skip
_SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "head_dim": 16,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_experts_per_tok": 2,
}  # fmt: skip
CASES = {
    "qwen2.5-7b": ReshardCase("qwen2.5-7b", {}, *_DENSE),
    "qwen3-30b-a3b": ReshardCase("qwen3-30b-a3b", {}, *_EXPERTS, 8),
    "qwen3-30b-a3b-sliced": ReshardCase("qwen3-30b-a3b", {}, *_SLICED, 8),
    "deepseek-v3": ReshardCase("deepseek-v3", _FLAT, *_EXPERTS, 1),
    "deepseek-v3-sliced": ReshardCase("deepseek-v3", _FLAT, *_SLICED, 1),
    "tiny": ReshardCase("qwen3-30b-a3b", _SMALL, *_EXPERTS, 2),
}


def layouts_of(name: str, num_ranks: int) -> tuple[MegatronLayout, ShardLayout]:
    """Return the layouts of trainer and engine of a case."""
    case = CASES[name]
    config = json.loads((CONFIGS / f"{case.model}.json").read_text())
    config.pop("quantization_config", None)
    config |= {"num_hidden_layers": 2, "vocab_size": 1024, **case.changes}
    for key in {"num_experts", "n_routed_experts"} & config.keys():
        config[key] = case.experts_per_rank * num_ranks
    spec = spec_from_hf_config(config)
    return layouts_from_texts(spec, case.train[num_ranks], case.rollout[num_ranks], num_ranks)


# --- weights whose every element follows from its place ------------------------------


def dtype_of(layout: ShardLayout, hf_name: str) -> torch.dtype:
    """Return the element type of a HF tensor on the wire."""
    return wire_dtype(layout.dtype_of(hf_name), DTYPE)


def true_weights(layout: ShardLayout, hf_name: str, box: Box) -> torch.Tensor:
    """Return a rectangle of a HF tensor: bit patterns of finite numbers from name and index."""
    index = torch.full((1,) * len(box.size), zlib.crc32(hf_name.encode()) % 65521)
    stride = 1
    for dim in reversed(range(len(box.size))):
        shape = [-1 if d == dim else 1 for d in range(len(box.size))]
        index = index + stride * torch.arange(box.lo[dim], box.lo[dim] + box.size[dim]).view(shape)
        stride *= layout.shape_of(hf_name)[dim]
    dtype = dtype_of(layout, hf_name)
    bits = (index * 40503) & 0x3FFF  # a finite number in all types
    return bits.to(_BITS[dtype.itemsize]).view(dtype)


def shown(params: Params, piece: Piece) -> torch.Tensor:
    """Return the view of a piece in a rank's parameters."""
    view: torch.Tensor = piece.view.of(params[piece.param])[piece.param_box.slices]
    return view


def make_params(layout: ShardLayout, rank: int, filled: bool) -> dict[str, torch.Tensor]:
    """Return a rank's parameters with the true weights, or with bits that no weight has."""
    own = {s.piece.param: dtype_of(layout, s.piece.hf_name) for s in pieces_of(layout, rank)}
    params = {}
    for name, shape in layout.local_shapes(rank).items():
        dtype = own.get(name, DTYPE)
        params[name] = torch.full(shape, -1, dtype=_BITS[dtype.itemsize]).view(dtype)
    for shard in pieces_of(layout, rank) if filled else ():
        piece = shard.piece
        shown(params, piece).copy_(true_weights(layout, piece.hf_name, piece.hf_box))
    return params


def differing(layout: ShardLayout, rank: int, params: Params) -> list[str]:
    """Return the parameters of a rank that differ from the true weights in any bit."""
    wrong = []
    for shard in pieces_of(layout, rank):
        piece = shard.piece
        found = shown(params, piece)
        expected = true_weights(layout, piece.hf_name, piece.hf_box)
        bits = _BITS[found.element_size()]
        if not torch.equal(found.view(bits), expected.view(bits)):
            wrong.append(f"{piece.param} ({piece.hf_name})")
    return wrong


# --- the ways ------------------------------------------------------------------------


class Direct:
    """The product's reshard."""

    def __init__(
        self, source: MegatronLayout, target: ShardLayout, read: Params, write: Params, bucket: int
    ) -> None:
        world = source.parallel.world
        self._weights = read, write
        self._resharder = Resharder(
            source,
            target,
            rank=dist.get_rank(),
            ranks_per_node=world,
            transport=make_transport("p2p", world, torch.device("cpu")),
            dtype=DTYPE,
            bucket_bytes=bucket,
        )

    def run(self) -> int:
        """Reshard once and return the bytes that this rank received. Collective: the world."""
        self._resharder.run(*self._weights)
        return self._resharder.traffic.receive_bytes


@dataclass(frozen=True, slots=True)
class _Broadcast:
    """A shard of the trainer on its way to all ranks of a replica.

    Attributes:
        buffer: Place of the shard in the staging buffer, [bytes] uint8.
        sender: Rank that holds the shard.
        group: Ranks of the replica.
        packs: Pair (staged shard, own shard) to copy before, on the sender.
        cuts: Pairs (engine parameter, staged part) to copy after.
    """

    buffer: torch.Tensor
    sender: int
    group: dist.ProcessGroup
    packs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    cuts: Sequence[tuple[torch.Tensor, torch.Tensor]]


class Gather:
    """Gathers whole tensors on every rank and cuts the engine's part; its buffer is reused."""

    def __init__(
        self, source: MegatronLayout, target: ShardLayout, read: Params, write: Params, bucket: int
    ) -> None:
        rank, grid = dist.get_rank(), source.parallel
        wanted: dict[str, list[Piece]] = {}
        for shard in pieces_of(target, rank):
            wanted.setdefault(shard.piece.hf_name, []).append(shard.piece)
        self._rounds: list[list[_Broadcast]] = [[]]
        staging, start = torch.empty(bucket, dtype=torch.uint8), 0
        for experts in (False, True):
            names = [n for n in source.hf_shapes if ("{e}" in locate(n)[0]) == experts]
            replicas: dict[Any, list[int]] = {}
            for other in range(grid.world if names else 0):
                at = grid.coords(other)
                key = grid.expert_coords(other).dp if experts else (at.dp, at.cp)
                replicas.setdefault(key, []).append(other)
            groups = {tuple(ranks): dist.new_group(ranks) for ranks in replicas.values()}
            mine = next((ranks for ranks in groups if rank in ranks), ())
            for shard in (s for name in names for s in source.shards(name)):
                owners = [owner for owner in shard.owner_ranks if owner in mine]
                if not owners or shard.is_replica:
                    continue
                piece, dtype = shard.piece, dtype_of(source, shard.piece.hf_name)
                size = piece.hf_box.num_elements * dtype.itemsize
                if start + size > len(staging):
                    self._rounds.append([])
                    start, staging = 0, staging if size <= bucket else staging.new_empty(size)
                buffer = staging[start : start + size]
                start += round_up(size, 8)
                staged = buffer.view(dtype).view(piece.hf_box.size)
                packs = [(staged, shown(read, piece))] if owners[0] == rank else []
                cuts = list(_cuts(piece, staged, wanted.get(piece.hf_name, ()), write))
                self._rounds[-1].append(_Broadcast(buffer, owners[0], groups[mine], packs, cuts))

    def run(self) -> int:
        """Reshard once and return the bytes that this rank received. Collective: the world."""
        received = 0
        for moves in self._rounds:
            pending = []
            for move in moves:
                for to, origin in move.packs:
                    to.copy_(origin)
                pending.append(
                    dist.broadcast(move.buffer, move.sender, group=move.group, async_op=True)
                )
                received += 0 if move.packs else move.buffer.numel()
            for work in pending:
                work.wait()
            for to, origin in (pair for move in moves for pair in move.cuts):
                to.copy_(origin)
        return received


def _cuts(
    piece: Piece, staged: torch.Tensor, wanted: Iterable[Piece], write: Params
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the engine's parameters that a staged shard fills, each with its part of the shard."""
    for want in wanted:
        if box := piece.hf_box.intersect(want.hf_box):
            inside = box.moved(want.hf_box, want.param_box)
            whole = Box.whole(piece.hf_box.size)
            yield (
                want.view.of(write[want.param])[inside.slices],
                staged[box.moved(piece.hf_box, whole).slices],
            )


WAYS: dict[str, Callable[..., Direct | Gather]] = {"direct": Direct, "gather": Gather}


# --- one case ------------------------------------------------------------------------


def race(name: str, num_ranks: int, repeats: int, bucket_bytes: int) -> dict[str, Any]:
    """Run a case on this rank and return figures of all ranks. Collective: the world.

    Raises:
        RuntimeError: A way left weights that differ from the HF tensors.
    """
    rank, (source, target) = dist.get_rank(), layouts_of(name, num_ranks)
    read, write = make_params(source, rank, True), make_params(target, rank, False)
    ways = {w: build(source, target, read, write, bucket_bytes) for w, build in WAYS.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    received: dict[str, int] = {}
    for repeat in range(repeats + 1):  # the first run is not timed
        for way, prepared in ways.items():
            for param in write.values() if repeat == repeats else ():
                param.view(_BITS[param.element_size()]).fill_(-1)
            dist.barrier()
            start_s = time.perf_counter()
            received[way] = prepared.run()
            dist.barrier()
            if repeat:
                seconds[way].append(time.perf_counter() - start_s)
            if repeat == repeats and (wrong := differing(target, rank, write)):
                raise RuntimeError(
                    f"{name}, {way}: {len(wrong)} parameters of rank {rank} differ from the HF "
                    f"tensors, first {wrong[0]}"
                )
    proofs = time_proofs(source, target, read, write, repeats)
    floor = rank_floor(source, target, rank, element_bytes_of(source, DTYPE.itemsize))
    ranks = gather_objects((received, floor))
    return {
        "case": name,
        "ranks": num_ranks,
        "train": CASES[name].train[num_ranks],
        "rollout": CASES[name].rollout[num_ranks],
        "weights_bytes": sum(prod(s) * DTYPE.itemsize for s in source.hf_shapes.values()),
        "floor_bytes": max(floor for _, floor in ranks),
        "ways": {
            way: {
                "median_s": statistics.median(seconds[way]),
                "received_bytes": sum(of_rank[way] for of_rank, _ in ranks),
                "busiest_bytes": max(of_rank[way] for of_rank, _ in ranks),
            }
            for way in ways
        },
        "proofs": proofs,
    }


def time_proofs(
    source: MegatronLayout, target: ShardLayout, read: Params, write: Params, repeats: int
) -> dict[str, float]:
    """Return the median seconds of a proof of all rows and of a sample. Collective: the world.

    Raises:
        RuntimeError: A proof says that the weights differ.
    """
    verifier = WeightVerifier(source, target, dist.get_rank(), DTYPE)
    seconds: dict[str, list[float]] = {"full": [], "sampled": []}
    for repeat in range(repeats + 1):  # the first one makes the weights of the sums
        for kind, sample in (("full", None), ("sampled", repeat)):
            dist.barrier()
            start_s = time.perf_counter()
            if wrong := verifier.differing_tensors(read, write, sample=sample):
                raise RuntimeError(f"{kind} proof: {len(wrong)} tensors differ, first {wrong[0]}")
            if repeat:
                seconds[kind].append(time.perf_counter() - start_s)
    return {kind: statistics.median(times) for kind, times in seconds.items()}


def table(record: Mapping[str, Any]) -> str:
    """Format the figures of one case."""
    ours, floor = record["ways"]["direct"]["median_s"], f"{record['floor_bytes'] / 1e6:.1f}"
    rows = [["way", "seconds", "x ours", "all MB", "busiest MB", "floor MB"]]
    for name, way in record["ways"].items():
        seconds, ratio = f"{way['median_s']:.3f}", f"{way['median_s'] / ours:.2f}"
        moved = (f"{way[key] / 1e6:.1f}" for key in ("received_bytes", "busiest_bytes"))
        rows.append([name, seconds, ratio, *moved, floor])
    shares = (f"{kind} {s:.3f} s ({s / ours:.1%})" for kind, s in record["proofs"].items())
    proofs = "proofs beside direct: " + ", ".join(shares)
    title = (
        f"{record['case']}: {record['train']} -> {record['rollout']}, {record['ranks']} ranks, "
        f"{record['weights_bytes'] / 1e6:.1f} MB"
    )
    return "\n".join([title, *aligned(rows), proofs, ""])


def run(args: argparse.Namespace) -> None:
    """Race all cases on this rank; rank 0 prints. Collective: the world."""
    records = []
    for name in args.cases:
        records.append(race(name, args.ranks, args.repeats, args.bucket_mb << 20))
        if dist.get_rank() == 0:
            print(table(records[-1]), flush=True)
    if dist.get_rank() == 0:
        print_result("reshard", cases=records)


def main() -> None:
    """Start the ranks and wait for them."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, choices=(4, 8), default=4, help="gloo ranks (4)")
    parser.add_argument(
        "--cases", nargs="+", choices=tuple(CASES), default=["qwen2.5-7b", "qwen3-30b-a3b"]
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each way (3)")
    parser.add_argument("--bucket-mb", type=int, default=128, help="of a round, MiB (128)")
    args = parser.parse_args()
    if min(args.repeats, args.bucket_mb) < 1:
        parser.error("--repeats and --bucket-mb must be at least 1")
    spawn(run, args, args.ranks)


if __name__ == "__main__":
    main()
