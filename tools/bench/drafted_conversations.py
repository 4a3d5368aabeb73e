"""Counts the engine's steps for conversations with the calculator, with drafts and without.

    python tools/bench/drafted_conversations.py     # 8 prompts x 8 conversations of 240 tokens

A tiny model has seen conversations in which it asks the calculator for one sum after the other,
``calc(47+3)``, each with the answer before it. It holds such conversations on an engine of one
rank, with drafts after every step, as long as pays at a cost of 1/20 of a step per drafted token:

epoch 1..3  conversations of new seeds in each, with those of the epochs before
again       the seeds of the last epoch once more: the true continuation is among the drafts, which
            is the limit

All tokens are compared with those of an engine without drafts. ``agree`` is the share of tokens
that the conversation before it of the same prompt has at the same place. The last line is RESULT
and a JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import torch

from bench.drafts import STEPS, plans
from bench.engine_alone import add_engine_flags, build
from bench.jobs import parser_of, print_result, torchrun
from mindspeed_rl.core.tables import aligned

EPOCHS = (("epoch 1", 1), ("epoch 2", 2), ("epoch 3", 3), ("again", 3))
BATCH = 16


def questions(count: int) -> list[tuple[int, int]]:
    """Return starts and summands."""
    return [(10 + 7 * i % 80, 2 + i % 8) for i in range(count)]


def conversation(tokenizer: Any, start: int, summand: int, limit: int) -> tuple[list[int], int]:
    """Return the tokens of a right conversation with its prompt, and the length of the prompt."""
    from mindspeed_rl.environments import answer_tokens

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    ids = encode(f"<|user|>{start}+{summand}<|assistant|>")
    behind = len(ids)
    while len(ids) < behind + limit:
        ids += encode(f"calc({start}+{summand})<|end|>")
        start += summand
        ids += answer_tokens(tokenizer, str(start))
    return ids[: behind + limit], behind


def write_model(folder: Path, args: argparse.Namespace) -> None:
    """Train a tiny model on conversations, and write it."""
    from make_tiny_model import write_tiny_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_tiny_model(folder, num_layers=args.num_layers)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [conversation(tokenizer, a, b, args.tokens)[0] for a, b in questions(80)]
    ids = torch.tensor([row[: min(map(len, rows))] for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.train_steps):
        chosen = ids[torch.randint(0, len(rows), (BATCH,), generator=generator)]
        logits = model(chosen).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), chosen[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.save_pretrained(folder)
    print(f"loss after {args.train_steps} supervised steps: {float(loss.detach()):.2f}")


def converse(engine: Any, args: argparse.Namespace, tokenizer: Any, step: int) -> dict[int, Any]:
    """Return the tokens of all conversations of a step, and which of them the model said."""
    from mindspeed_rl.core.types import Prompt
    from mindspeed_rl.environments import LocalRunner
    from mindspeed_rl.environments.builtin.calculator import Calculator
    from mindspeed_rl.generation.multi_turn import Environments, run_conversations
    from mindspeed_rl.rollout.requests import SamplingSettings, request_seed

    found: dict[int, Any] = {}

    class Samples:
        """Takes the samples of conversations that are over."""

        def add(self, rollout: Any, _: float | None = None) -> None:
            """Keep the tokens."""
            found[rollout.sample_id] = rollout.completion.token_ids, rollout.completion.loss_mask

    prompts = {}
    for i in range(args.prompts * args.group):
        start, summand = questions(args.prompts)[i // args.group]
        ids, behind = conversation(tokenizer, start, summand, 1)
        prompts[i] = Prompt(i // args.group, tuple(ids[:behind]), "", "0")
    environments = Environments(
        LocalRunner(Calculator, tokenizer, 0), "calculator", args.tokens, 0.0, in_step=True
    )
    settings = SamplingSettings(1.0, args.tokens, (tokenizer.eos_token_id,))
    samples: Any = Samples()
    run_conversations(
        environments, prompts, engine, settings, 1,
        lambda sample, turn: request_seed(0, step, sample, 0, turn), samples,
    )  # fmt: skip
    return {i: (prompts[i].token_ids, *found[i]) for i in sorted(found)}


def figures(done: Mapping[int, Any], stats: Any, group: int) -> dict[str, float]:
    """Return what an epoch's conversations took."""
    same = [
        x == y
        for (i, (_, one, _)), (_, (_, other, _)) in pairwise(done.items())
        if (i + 1) % group
        for x, y in zip(one, other, strict=False)
    ]
    said = max(sum(mask) for _, _, mask in done.values())
    return {
        "tokens": sum(len(tokens) for _, tokens, _ in done.values()) / len(done),
        "agree": sum(same) / len(same),
        "steps_per_token": (stats.response_steps or stats.sampled_tokens) / stats.sampled_tokens,
        "engine_steps_per_token": stats.steps / said,
        "draft": stats.drafted_tokens / max(1, stats.drafts),
        "accepted": stats.kept_tokens / max(1, stats.drafts),
    }


def measure(args: argparse.Namespace) -> None:
    """Hold the conversations of all epochs as one of the ways, and write figures and digests."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    from mindspeed_rl.rollout.draft_costs import DraftRule
    from mindspeed_rl.rollout.draft_history import DraftHistory, prompt_key
    from mindspeed_rl.rollout.stats import StepStats

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    history, drafts = DraftHistory(2**28), {}
    if args.way != "none":
        drafts = {"draft_rule": DraftRule(most=args.most), "draft_history": history}
    engine = build(args, args.prompts * args.group, **drafts)
    engine.begin_update()
    for name, tensor in load_file(Path(args.model, "model.safetensors")).items():
        engine.load_tensor(name, tensor)
    engine.finish_update(1)
    rows = []
    with plans(args.way):
        for name, step in EPOCHS:
            stats = engine.stats = StepStats()
            done = converse(engine, args, tokenizer, step)
            for prompt, tokens, _ in done.values():
                history.add(prompt_key(prompt), tokens)
            digest = hashlib.sha256(repr(done).encode()).hexdigest()
            rows.append({"epoch": name, "digest": digest, **figures(done, stats, args.group)})
    Path(args.result).write_text(json.dumps(rows))


def launch(args: argparse.Namespace) -> None:
    """Run an engine without drafts and one with them, and print their figures."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="conversations-") as folder:
        model, file = Path(folder) / "model", Path(folder) / "result"
        write_model(model, args)
        for way in ("none", STEPS):
            flags = ["--way", way, "--model", str(model), "--result", str(file)]
            torchrun(1, __file__, *sys.argv[1:], *flags, quiet=True)
            found[way] = json.loads(file.read_text())
    digests = [[row.pop("digest") for row in rows] for rows in found.values()]
    equal = digests[0] == digests[1]
    print(f"tokens with drafts are {'those without' if equal else 'OTHERS than without'}")
    table = [list(found["none"][0])]
    for rows in found.values():
        table += [[row["epoch"], *(f"{v:.2f}" for v in list(row.values())[1:])] for row in rows]
    print("\n".join(aligned(table)))
    print_result("drafted_conversations", equal=equal, **found)


def main() -> None:
    """Start the processes, or run as one of them."""
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=8, help="prompts (8)")
    parser.add_argument(
        "--group", type=int, default=8, help="conversations of each, at least 2 (8)"
    )
    parser.add_argument("--most", type=int, default=8, help="longest draft (8)")
    parser.add_argument("--train-steps", type=int, default=120, help="supervised steps (120)")
    add_engine_flags(parser, tokens=240)
    args = parser.parse_args()
    if args.way:
        measure(args)
    else:
        launch(args)


if __name__ == "__main__":
    main()
