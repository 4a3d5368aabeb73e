"""Checks a checkpoint, or a config alone, against the weight table of its family.

Every key must be in the table, every element exactly once in the training and the rollout layout,
except declared padding. Exit status: 0 no findings, 1 findings, 2 an unsupported input.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

from mapping_checks import check_checkpoint, check_layout, summary

from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.core.stages import even_stages, listed_stages
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.spec import ModelSpec, read_hf_config
from mindspeed_rl.rollout.vllm.layout import VllmLayout
from mindspeed_rl.weights.layouts.megatron import MegatronLayout

_TRAIN, _ROLLOUT = ("tp", "pp", "cp", "dp", "vpp", "ep", "etp"), ("tp", "dp", "ep", "pad-experts")


def _sizes(flag: str, text: str, allowed: tuple[str, ...]) -> Counter[str]:
    """Parse NAME=NUMBER pairs; names that are not given stay missing."""
    sizes: Counter[str] = Counter()
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in allowed or not value.isdecimal() or int(value) < 1:
            raise ValueError(f"{flag} {part}: give NAME=NUMBER, names are {', '.join(allowed)}")
        sizes[name] = int(value)
    return sizes


def _training(spec: ModelSpec, args: argparse.Namespace) -> MegatronLayout:
    given = _sizes("--train", args.train, _TRAIN)
    tp, pp, cp, dp, vpp, ep = (given[name] or 1 for name in _TRAIN[:6])
    parts = [part for part in args.num_layer_list.split(",") if part]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--num-layer-list {args.num_layer_list}: give numbers, such as 3,4")
    counts = [int(part) for part in parts]
    if counts:
        stages = listed_stages(spec.num_layers, pp, counts)
    else:
        stages = even_stages(spec.num_layers, pp, vpp)
    world, etp = tp * pp * cp * dp, given["etp"] or None
    grid = ParallelLayout.build(world=world, stages=stages, tp=tp, cp=cp, ep=ep, etp=etp)
    return MegatronLayout(spec, grid)


def _rollout(spec: ModelSpec, args: argparse.Namespace) -> VllmLayout:
    given = _sizes("--rollout", args.rollout, _ROLLOUT)
    tp, dp, ep, multiple = (given[name] or 1 for name in _ROLLOUT)
    if ep not in (1, tp * dp):
        raise ValueError(f"--rollout ep={ep}: allowed are 1 and tp x dp = {tp * dp}")
    return VllmLayout(spec, EngineLayout(tp * dp, tp, dp, ep > 1), multiple)


def _read_config(args: argparse.Namespace) -> dict[str, Any]:
    if not args.hf_config:
        return read_hf_config(args.hf_checkpoint)
    config = read_hf_config(args.hf_config, or_file=True, flag="--hf-config")
    if config.pop("quantization_config", None):
        print("note: weights are quantised; sizes are those of the converted checkpoint")
    return config


def main() -> int:
    """Parse the flags, check the layouts, print the findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hf-checkpoint", metavar="DIR", help="Safetensors or their index.")
    parser.add_argument("--hf-config", metavar="FILE", help="Instead of DIR/config.json.")
    parser.add_argument("--train", default="", help=f"tp=2,pp=4,...; names: {', '.join(_TRAIN)}.")
    parser.add_argument("--num-layer-list", default="", help="Layers of each stage.")
    parser.add_argument("--rollout", default="", help=f"tp=8,...; names: {', '.join(_ROLLOUT)}.")
    args = parser.parse_args()
    if not (args.hf_checkpoint or args.hf_config):
        parser.error("give --hf-checkpoint DIR, --hf-config FILE, or both")
    findings: list[str] = []
    try:
        spec = spec_from_hf_config(_read_config(args))
        if args.hf_checkpoint:
            findings += check_checkpoint(spec, args.hf_checkpoint, print)
        layouts = (_training(spec, args), _rollout(spec, args))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for layout in layouts:
        findings += check_layout(layout)
    print("\n".join(summary(spec)))
    for finding in findings:
        print(f"FINDING: {finding}")
    print(f"{len(findings)} findings" if findings else "every key and element exactly once")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
