"""Predicts what a reshard moves, for any model and any number of ranks, without a device.

It compares bytes in and out per rank with the floors and with whole tensors for every rank, and
counts bytes on the critical path, staging, messages, planning time. Weights are in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import needs_environment  # noqa: F401
from layout_texts import ROLLOUT_KEYS, TRAIN_KEYS, layouts_from_texts
from reshard_figures import (
    RoundTraffic,
    busiest_bytes,
    busiest_inter_node_bytes,
    critical_bytes,
    node_floors,
    rank_floor,
    rank_need,
    round_traffic,
)

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.tables import aligned
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.expert_placement.near_trainer import placed_near_trainer
from mindspeed_rl.handover.joint import Handover, handover
from mindspeed_rl.metrics.progress import RunProgress
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.spec import ModelSpec, read_hf_config
from mindspeed_rl.weight_layouts.base import ShardLayout
from mindspeed_rl.weight_layouts.hf_file import HfFileLayout
from mindspeed_rl.weight_layouts.megatron import MegatronLayout
from mindspeed_rl.weights.executor import ROUNDS_IN_FLIGHT, plan_rounds
from mindspeed_rl.weights.planner import Overlaps, plan_reshard
from mindspeed_rl.weights.traffic import RankTraffic, element_bytes_of, rank_traffic

EXAMPLE = """example:
  python tools/inspect_plan.py --hf-config DeepSeek-V3/config.json --world 256 \\
      --train tp=4,pp=8,ep=8,moe_tp_extend_ep=1,num_layer_list=7-8-8-8-8-8-7-7 \\
      --rollout tp=2,dp=128,ep=256 --ranks 0,17,255 \\
      --intra-node-gbs 150 --inter-node-gbs 25 --json plan.json
"""


BF16_BYTES = 2
Figures: TypeAlias = dict[str, Any]
CONFIGS = Path(__file__).resolve().parents[1] / "pretrain_scripts" / "models" / "configs"
# Reference cases: config, --train, --rollout, --world.
CASES = {
    "A": ("qwen2.5-7b", "tp=4,pp=2", "tp=2", 16),
    "B": ("qwen3-30b-a3b", "tp=4,pp=2,ep=8,etp=1", "tp=2,dp=8,ep=16", 16),
    "C": (
        "qwen3-235b-a22b",
        "tp=4,pp=4,cp=4,ep=32,etp=1,num_layer_list=23-24-24-23",
        "tp=4,dp=32,ep=128",
        128,
    ),
    "D": (
        "deepseek-v3",
        "tp=4,pp=8,ep=8,moe_tp_extend_ep=1,num_layer_list=7-8-8-8-8-8-7-7",
        "tp=2,dp=128,ep=256",
        256,
    ),
    "E": ("qwen3-30b-a3b", "tp=1,pp=2,ep=8,etp=1", "tp=2", 16),
    "F": (
        "qwen3-235b-a22b",
        "tp=4,pp=8,ep=16,etp=1,num_layer_list=12-12-12-12-12-12-11-11",
        "tp=8",
        128,
    ),
    "G": (
        "deepseek-v3",
        "tp=1,pp=16,ep=16,etp=1,num_layer_list=3-4-4-4-4-4-4-4-4-4-4-4-4-4-4-2",
        "tp=32",
        256,
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = "; ".join(f"{name}: {model} on {n} ranks" for name, (model, _, _, n) in CASES.items())
    parser.add_argument(
        "--case",
        choices=tuple(CASES),
        help=f"a reference case instead of --hf-config, --train, --rollout and --world: {cases}",
    )
    parser.add_argument("--hf-config", metavar="PATH", help="config.json, or a folder with it")
    for flag, keys in (("--train", TRAIN_KEYS), ("--rollout", ROLLOUT_KEYS)):
        named = ", ".join(f"{key} ({name})" for key, name in keys.items())
        parser.add_argument(flag, default="", metavar="KEY=VALUE,...", help=f"keys: {named}")
    parser.add_argument(
        "--expert-placement",
        choices=("linear", "trainer"),
        default="linear",
        help="where the engine has its experts, as --rollout-expert-placement of a run",
    )
    parser.add_argument("--world", type=_count, help="ranks of the whole job")
    parser.add_argument(
        "--ranks", default="all", help="ranks to look at: all (the default), or 0,17,..."
    )
    parser.add_argument("--ranks-per-node", type=_count, default=16, help="default: 16")
    parser.add_argument(
        "--reshard-bucket-mb",
        type=_size,
        default=512.0,
        help="send plus receive staging of a rank, in MiB; default: 512",
    )
    parser.add_argument(
        "--reshard-relay",
        action="store_true",
        help="also direct with a relay: each node receives what it lacks once and passes it on",
    )
    parser.add_argument(
        "--intra-node-gbs", type=_size, help="GB/s and direction of a rank within its node"
    )
    parser.add_argument(
        "--inter-node-gbs", type=_size, help="GB/s and direction of a rank to other nodes"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there as well")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number above 0")
    return int(text)


def _size(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and finite")
    return value


def model_of(args: argparse.Namespace) -> ModelSpec:
    """Fill in the flags of ``--case`` and the ranks to inspect; return the architecture.

    Raises:
        UsageError: A flag is not possible; the message names what is.
    """
    if args.case:
        model, args.train, args.rollout, args.world = CASES[args.case]
        args.hf_config = CONFIGS / f"{model}.json"
    if not args.hf_config or args.world is None:
        raise UsageError("give --hf-config and --world, or --case")
    if (args.intra_node_gbs is None) != (args.inter_node_gbs is None):
        raise UsageError("--intra-node-gbs and --inter-node-gbs belong together: give both or none")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise UsageError(f"--json {args.json}: the folder does not exist; make it first")
    config = read_hf_config(args.hf_config, or_file=True, flag="--hf-config")
    if config.pop("quantization_config", None):
        print("note: the checkpoint is quantised; sizes are those of bfloat16", file=sys.stderr)
    args.ranks = _ranks(args.ranks, args.world)
    return spec_from_hf_config(config)


def layouts(spec: ModelSpec, args: argparse.Namespace) -> tuple[MegatronLayout, VllmLayout]:
    """Build both layouts without any cached lookups, as a rank does at its start."""
    source, target = layouts_from_texts(spec, args.train, args.rollout, args.world)
    if args.expert_placement == "trainer":
        if not target.engine.expert_parallel:
            raise UsageError("--expert-placement trainer: needs ep above 1 in --rollout")
        target = placed_near_trainer(source, target)
    return source, target


def _ranks(text: str, world: int) -> Sequence[int]:
    if text == "all":
        return range(world)
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) < world for part in parts):
        raise UsageError(
            f"--ranks {text}: allowed are all, or numbers from 0 to {world - 1} with commas "
            "between them"
        )
    return sorted({int(part) for part in parts})


def floors(spec: ModelSpec, args: argparse.Namespace) -> Figures:
    """Return the least bytes of any reshard, and those of whole tensors for every rank.

    Spreads are over the inspected ranks, those per node over all nodes.

    Raises:
        UsageError: The layouts do not fit the model or the world.
    """
    source, target = layouts(spec, args)
    bytes_of = element_bytes_of(source, BF16_BYTES)
    everywhere = HfFileLayout.of(source, range(args.world))
    of_nodes = node_floors(source, target, bytes_of, args.ranks_per_node)

    def of_ranks(layout: ShardLayout) -> Figures:
        return spread([rank_floor(source, layout, rank, bytes_of) for rank in args.ranks])

    return {
        "floor_bytes": of_ranks(target),
        "need_bytes": spread([rank_need(target, rank, bytes_of) for rank in args.ranks]),
        "node_floor_bytes": spread(list(of_nodes.values())),
        "whole_tensor_bytes": of_ranks(everywhere),
    }


def gather_and_sync(spec: ModelSpec, args: argparse.Namespace) -> Handover:
    """Count the gather of the distributed optimizer and the reshard together, of all ranks."""
    source, target = layouts(spec, args)
    return handover(
        source,
        target,
        train_item=BF16_BYTES,
        engine_item=BF16_BYTES,
        distributed_optimizer=True,
    )


def spread(values: Sequence[int]) -> Figures:
    """Return the smallest, mean and largest value."""
    return {"min": min(values), "mean": sum(values) / len(values), "max": max(values)}


def inspect(spec: ModelSpec, args: argparse.Namespace, *, relay: bool) -> Figures:
    """Plan the inspected ranks with one strategy; sizes are in bytes, times in seconds."""
    per_node = args.ranks_per_node
    name = "relay" if relay else "direct"
    source, target = layouts(spec, args)
    start = time.process_time()  # process time, as the machine may be busy
    overlaps = Overlaps(source, target, per_node, relay)
    bucket_bytes = int(args.reshard_bucket_mb * 2**20)
    _, schedule, _ = plan_rounds(
        overlaps, args.ranks[0], bucket_bytes=bucket_bytes, item_bytes=BF16_BYTES
    )
    plan_s = time.process_time() - start
    bytes_of = element_bytes_of(source, BF16_BYTES)
    totals: list[RankTraffic] = []
    by_round: list[RoundTraffic] = []
    count = len(args.ranks)
    progress = RunProgress(count, 0, f"{name}: planning ranks", count > 1, max(1, count // 4))
    for number, rank in enumerate(args.ranks, start=1):
        plan = plan_reshard(source, target, rank, per_node, relay=relay, overlaps=overlaps)
        totals.append(rank_traffic(plan, bytes_of, per_node))
        by_round.append(round_traffic(plan, schedule, source, bytes_of))
        progress.update(number, {})
    progress.close()
    # Sum over rounds of the largest max(sent, received) of a rank.
    critical = critical_bytes(by_round)
    # The rank with the most bytes between nodes.
    busiest = max(totals, key=lambda t: (busiest_inter_node_bytes(t), busiest_bytes(t)))
    between = min(busiest_inter_node_bytes(busiest), critical)
    estimated_s = None
    if args.intra_node_gbs:
        estimated_s = (critical - between) / 1e9 / args.intra_node_gbs
        estimated_s += between / 1e9 / args.inter_node_gbs
    in_flight = min(ROUNDS_IN_FLIGHT, schedule.num_rounds)
    return {
        "strategy": name,
        "recv_bytes": spread([t.receive_bytes for t in totals]),
        "recv_inter_node_bytes": spread([t.inter_node_receive_bytes for t in totals]),
        "recv_intra_node_bytes": spread(
            [t.receive_bytes - t.inter_node_receive_bytes for t in totals]
        ),
        "send_bytes": spread([t.send_bytes for t in totals]),
        "critical_bytes": critical,
        "critical_within_nodes_bytes": critical - between,
        "critical_between_nodes_bytes": between,
        "peak_staging_bytes": in_flight * max(r.peak_bytes for r in by_round),
        "messages_per_rank": sum(r.num_messages for r in by_round) / count,
        "most_messages": max(r.num_messages for r in by_round),
        "most_alone": max(r.num_alone for r in by_round),
        "rounds": schedule.num_rounds,
        "plan_s": plan_s,
        "estimated_s": estimated_s,
    }


def _gb(size: float) -> str:
    return f"{size / 1e9:.3f}"


def _gb_spread(figures: Figures) -> str:
    return " / ".join(_gb(figures[key]) for key in ("min", "mean", "max"))


def _column(figures: Figures) -> dict[str, str]:
    """Return the figures of one strategy as text, by label."""
    floor, seconds = figures["floor_bytes"]["mean"], figures["estimated_s"]
    return {
        "": figures["strategy"],
        "in per rank, GB (min / mean / max)": _gb_spread(figures["recv_bytes"]),
        "  from other nodes": _gb_spread(figures["recv_inter_node_bytes"]),
        "  from its own node": _gb_spread(figures["recv_intra_node_bytes"]),
        "out per rank, GB": _gb_spread(figures["send_bytes"]),
        "in / floor": f"{figures['recv_bytes']['mean'] / floor:.2f}" if floor else "-",
        "critical path, GB": _gb(figures["critical_bytes"]),
        "  within nodes": _gb(figures["critical_within_nodes_bytes"]),
        "  between nodes": _gb(figures["critical_between_nodes_bytes"]),
        "peak staging, GB": _gb(figures["peak_staging_bytes"]),
        "messages per rank (mean / max)": (
            f"{figures['messages_per_rank']:.0f} / {figures['most_messages']}"
        ),
        "  more with p2p (max)": str(figures["most_alone"]),
        "rounds": str(figures["rounds"]),
        "planning one rank, s": f"{figures['plan_s']:.2f}",
    } | ({} if seconds is None else {"on the wire, s": f"{seconds:.3f}"})


def table(strategies: Sequence[Figures], args: argparse.Namespace) -> str:
    """Format the floors and one column per strategy."""
    first = strategies[0]
    spreads = {
        "floor per rank": "floor_bytes",
        "floor per node": "node_floor_bytes",
        "floor of a disjoint engine": "need_bytes",
        "whole tensors to every rank": "whole_tensor_bytes",
    }
    columns = [_column(figures) for figures in strategies]
    lines = [
        f"{len(args.ranks)} of {args.world} ranks, {args.ranks_per_node} per node",
        *(f"{what}, GB (min / mean / max): {_gb_spread(first[k])}" for what, k in spreads.items()),
        "",
        *aligned([[label, *(column[label] for column in columns)] for label in columns[0]]),
    ]
    return "\n".join(lines)


def main() -> None:
    """Parse the flags, plan the ranks, print the figures."""
    parser = _parser()
    args = parser.parse_args()
    try:
        spec = model_of(args)
        least = floors(spec, args)
    except UsageError as error:
        parser.error(str(error))
    relays = (False, True) if args.reshard_relay else (False,)
    strategies = [least | inspect(spec, args, relay=relay) for relay in relays]
    together = gather_and_sync(spec, args)
    strategies = [figures | {"handover": together.as_json()} for figures in strategies]
    print(table(strategies, args))
    print("\nwith --use-distributed-optimizer, of all ranks:")
    print("\n".join([*aligned(list(together.rows())), *together.verdict()]))
    if args.json:
        Path(args.json).write_text(json.dumps(strategies, indent=1) + "\n")
        print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
