"""Counts the engine's steps per token with drafts from earlier responses, on the CPU engine.

    python tools/bench/drafts.py             # 16 prompts x 8 samples of 160 tokens, under a minute

none        without drafts: 1
epoch 1..3  samples of new seeds in each, with the responses of the epochs before
again       the seeds of the last epoch once more: the true continuation is among the drafts, which
            is the limit

The model is random, with 2 layers; the sharper its head is, the more siblings agree. ``agree`` is
the share of tokens that the response before it of the same prompt has at the same place. The last
line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.core.tables import aligned

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.engine_steps import PROMPT, build
from bench.jobs import parser_of, print_result, torchrun

SHARPNESS = (0.2, 0.6, 2.0)
TEMPERATURE = 0.7


def give_weights(engine: Any, sharpness: float, version: int) -> None:
    """Give the engine random weights whose head has this standard deviation."""
    generator = torch.Generator().manual_seed(0)
    engine.begin_update()
    for name, view in engine.weight_views().items():
        view.normal_(0, sharpness if "head" in name else 0.3, generator=generator)
    engine.finish_update(version)


def run_epochs(engine: Any, history: Any, args: argparse.Namespace, version: int) -> list[Any]:
    """Sample three epochs and the last one again; return a row of figures for each."""
    from mindspeed_rl.rollout.draft_history import prompt_key
    from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings, request_seed
    from mindspeed_rl.rollout.stats import StepStats

    settings, rows = SamplingSettings(TEMPERATURE, args.tokens, ()), []
    for name, step in (("epoch 1", 1), ("epoch 2", 2), ("epoch 3", 3), ("again", 3)):
        requests = [
            GenerationRequest(
                i,
                (version, *range(5 + i // args.group, 4 + PROMPT + i // args.group)),
                request_seed(0, step, i),
            )
            for i in range(args.prompts * args.group)
        ]
        stats = engine.stats = StepStats()
        done = engine.generate(requests, settings, version)
        for request in requests:
            history.add(prompt_key(request.token_ids), done[request.sample_id].token_ids)
        pairs = [p for p in pairwise(requests) if p[0].token_ids == p[1].token_ids]
        same = [
            x == y
            for one, other in pairs
            for x, y in zip(
                done[one.sample_id].token_ids, done[other.sample_id].token_ids, strict=True
            )
        ]
        rows.append(
            {
                "way": name,
                "agree": sum(same) / len(same),
                "steps_per_token": stats.response_steps / stats.sampled_tokens,
                "engine_steps_per_token": stats.steps / args.tokens,
                "draft": stats.drafted_tokens / max(1, stats.drafts),
                "kept": stats.kept_tokens / max(1, stats.drafts),
            }
        )
    return rows


def measure(args: argparse.Namespace) -> None:
    """Run all epochs of every sharpness and write their figures."""
    from mindspeed_rl.rollout.draft_history import DraftHistory
    from mindspeed_rl.rollout.drafts import DraftRule

    args.sequences = args.prompts * args.group
    history = DraftHistory(2**28)
    engine = build(args, draft_rule=DraftRule(most=args.most), draft_history=history)
    found = {}
    for version, sharpness in enumerate(SHARPNESS, 1):
        give_weights(engine, sharpness, version)
        found[str(sharpness)] = run_epochs(engine, history, args, version)
    Path(args.result).write_text(json.dumps(found))


def command_line() -> argparse.Namespace:
    """Read the flags; ``--model`` is given to the process that is started."""
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="prompts (16)")
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt, at least 2 (8)")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of each (160)")
    parser.add_argument("--most", type=int, default=8, help="longest draft (8)")
    parser.add_argument("--num-layers", type=int, default=2, help="layers of the model (2)")
    parser.add_argument("--kv-cache-mb", type=int, default=512, help="MiB (512)")
    for name in ("--model", "--result"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(args: argparse.Namespace) -> None:
    """Run the engine in a process of its own, and print its figures."""
    from make_tiny_model import write_tiny_model

    with tempfile.TemporaryDirectory(prefix="drafts-") as folder:
        model = write_tiny_model(Path(folder) / "model", num_layers=args.num_layers, weights=False)
        file = Path(folder) / "result"
        flags = [*sys.argv[1:], "--model", str(model), "--result", str(file)]
        torchrun(1, __file__, *flags, quiet=True)
        found = json.loads(file.read_text())
    table = [["head", *next(iter(found.values()))[0]]]
    for sharpness, rows in found.items():
        for row in rows:
            table.append([sharpness, row.pop("way"), *(f"{value:.2f}" for value in row.values())])
    print("\n".join(aligned(table)))
    print_result("drafts", tokens=args.tokens, steps={
        sharpness: [round(row["steps_per_token"], 4) for row in rows]
        for sharpness, rows in found.items()
    })  # fmt: skip


def main() -> None:
    """Start the process, or run as it."""
    args = command_line()
    if args.model:
        measure(args)
    else:
        launch(args)


if __name__ == "__main__":
    main()
