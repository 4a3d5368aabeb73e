"""What a reshard would move, for any model and any number of ranks, without a device.

For `direct`, `stream` and the ways of other projects (`gather`: every rank gets every tensor;
`two-stage`: experts only where needed): bytes in and out per rank, the floors, the bytes on the
critical path, staging, messages and planning time. Sizes are those of bfloat16 weights.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plan_strategies import MIB, Findings, Problem, Strategy, inspect

from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.resharding.layouts.from_text import ROLLOUT_KEYS, TRAIN_KEYS
from mindspeed_rl.resharding.traffic import Spread

EXAMPLE = """example:
  python tools/inspect_plan.py --hf-config DeepSeek-V3/config.json --world 256 \\
      --train tp=4,pp=8,ep=8,moe_tp_extend_ep=1,num_layer_list=7-8-8-8-8-8-7-7 \\
      --rollout tp=2,dp=128,ep=256 --ranks 0,17,255 \\
      --intra-node-gbs 150 --inter-node-gbs 25 --json plan.json
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hf-config", required=True, metavar="PATH", help="config.json, or a folder that holds it"
    )
    parser.add_argument(
        "--train", default="", metavar="KEY=VALUE,...", help=f"keys: {', '.join(TRAIN_KEYS)}"
    )
    parser.add_argument(
        "--rollout", default="", metavar="KEY=VALUE,...", help=f"keys: {', '.join(ROLLOUT_KEYS)}"
    )
    parser.add_argument("--world", required=True, type=int, help="ranks of the whole job")
    parser.add_argument(
        "--ranks", default="all", help="ranks to look at: all (the default), or 0,17,..."
    )
    parser.add_argument("--ranks-per-node", type=int, default=16, help="default: 16")
    parser.add_argument(
        "--reshard-bucket-mb",
        type=float,
        default=512.0,
        help="send plus receive staging of a rank, in MiB; default: 512",
    )
    parser.add_argument(
        "--reshard-relay",
        action="store_true",
        help="also direct with a relay: each node receives what it lacks once and passes it on",
    )
    parser.add_argument(
        "--intra-node-gbs", type=float, help="GB/s and direction of a rank within its node"
    )
    parser.add_argument(
        "--inter-node-gbs", type=float, help="GB/s and direction of a rank to other nodes"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there as well")
    return parser


def _read_spec(path: Path) -> ModelSpec:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(
            f"--hf-config {path}: {error.strerror}; give a config.json or a checkpoint's folder"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"--hf-config {path}: no JSON: {error}; give a config.json") from error
    if not isinstance(config, dict):
        raise ValueError(f"--hf-config {path}: no JSON object; give a config.json")
    if config.pop("quantization_config", None):
        print("note: the checkpoint is quantised; sizes are those of bfloat16", file=sys.stderr)
    return spec_from_hf_config(config)


def _ranks(text: str, world: int) -> list[int]:
    if text == "all":
        return list(range(world))
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) < world for part in parts):
        raise ValueError(
            f"--ranks {text}: allowed are all, or numbers from 0 to {world - 1} with commas "
            "between them"
        )
    return sorted({int(part) for part in parts})


def _positive(args: argparse.Namespace) -> None:
    speeds = (args.intra_node_gbs, args.inter_node_gbs)
    if (None in speeds) != (speeds == (None, None)):
        raise ValueError("--intra-node-gbs and --inter-node-gbs belong together: give both or none")
    names = ("world", "ranks_per_node", "reshard_bucket_mb", "intra_node_gbs", "inter_node_gbs")
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: must be above 0 and finite")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: the folder does not exist; make it first")


def problem_of(args: argparse.Namespace) -> Problem:
    """What the command line asks.

    Raises:
        ValueError: a flag that is not possible; the message names what is.
    """
    _positive(args)
    return Problem(
        spec=_read_spec(Path(args.hf_config)),
        train=args.train,
        rollout=args.rollout,
        world=args.world,
        ranks=_ranks(args.ranks, args.world),
        ranks_per_node=args.ranks_per_node,
        bucket_bytes=int(args.reshard_bucket_mb * MIB),
        relay=args.reshard_relay,
    )


def _seconds(strategy: Strategy, args: argparse.Namespace) -> float | None:
    if args.intra_node_gbs is None:
        return None
    return strategy.link_bytes.seconds(args.intra_node_gbs, args.inter_node_gbs)


def as_json(findings: Findings, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One object per strategy; sizes in bytes, times in seconds."""
    floors = asdict(Spread.of(list(findings.floors.values())))
    nodes = asdict(Spread.of(list(findings.node_floors.values())))
    return [
        {
            "strategy": s.name,
            "recv_bytes": asdict(s.recv_bytes),
            "recv_inter_node_bytes": asdict(s.inter_node_bytes),
            "recv_intra_node_bytes": asdict(s.intra_node_bytes),
            "floor_bytes": floors,
            "node_floor_bytes": nodes,
            "send_bytes": asdict(s.send_bytes),
            "critical_bytes": s.critical_bytes,
            "critical_within_nodes_bytes": s.link_bytes.within_nodes,
            "critical_between_nodes_bytes": s.link_bytes.between_nodes,
            "peak_staging_bytes": s.peak_staging_bytes,
            "messages_per_rank": s.messages_per_rank,
            "rounds": s.rounds,
            "plan_s": s.plan_s,
            "estimated_s": _seconds(s, args),
        }
        for s in findings.strategies
    ]


def _gb(size: float) -> str:
    return f"{size / 1e9:.3f}"


def _spread(spread: Spread) -> str:
    return f"{_gb(spread.min)} / {_gb(spread.mean)} / {_gb(spread.max)}"


def _rows(findings: Findings, strategy: Strategy, seconds: float | None) -> dict[str, str]:
    """The figures of one strategy by what they are, as text."""
    floor = sum(findings.floors.values()) / len(findings.floors)
    ratio = f"{strategy.recv_bytes.mean / floor:.2f}" if floor else "-"
    return {
        "in per rank, GB (min / mean / max)": _spread(strategy.recv_bytes),
        "  from other nodes": _spread(strategy.inter_node_bytes),
        "  from its own node": _spread(strategy.intra_node_bytes),
        "out per rank, GB": _spread(strategy.send_bytes),
        "in / floor": ratio,
        "critical path, GB": _gb(strategy.critical_bytes),
        "  within nodes": _gb(strategy.link_bytes.within_nodes),
        "  between nodes": _gb(strategy.link_bytes.between_nodes),
        "peak staging, GB": _gb(strategy.peak_staging_bytes),
        "messages per rank": f"{strategy.messages_per_rank:.0f}",
        "rounds": str(strategy.rounds),
        "planning one rank, s": f"{strategy.plan_s:.2f}" if strategy.plan_s else "-",
    } | ({} if seconds is None else {"on the wire, s": f"{seconds:.3f}"})


def table(findings: Findings, args: argparse.Namespace) -> str:
    """Floors, then one column per strategy."""
    columns = {s.name: _rows(findings, s, _seconds(s, args)) for s in findings.strategies}
    labels = list(columns["direct"])
    wide = max(map(len, labels))
    widths = {name: max(len(name), *map(len, rows.values())) for name, rows in columns.items()}
    lines = ["  ".join([" " * wide, *(f"{name:>{widths[name]}}" for name in columns)])]
    for label in labels:
        cells = (f"{rows[label]:>{widths[name]}}" for name, rows in columns.items())
        lines.append("  ".join([f"{label:<{wide}}", *cells]))
    floors, nodes = (
        Spread.of(list(values.values())) for values in (findings.floors, findings.node_floors)
    )
    return "\n".join(
        [
            f"{len(findings.floors)} of {args.world} ranks, {args.ranks_per_node} per node",
            f"floor per rank, GB (min / mean / max): {_spread(floors)}",
            f"floor per node, GB (min / mean / max): {_spread(nodes)}",
            "",
            *lines,
        ]
    )


def main() -> None:
    """Parse, plan, print."""
    parser = _parser()
    args = parser.parse_args()
    try:
        findings = inspect(problem_of(args))
    except ValueError as error:
        parser.error(str(error))
    print(table(findings, args))
    if args.json:
        Path(args.json).write_text(json.dumps(as_json(findings, args), indent=1) + "\n")
        print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
