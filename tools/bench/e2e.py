"""Times whole GRPO steps of ours against a plain loop of transformers and torch.

    python tools/bench/e2e.py                           # a model of 0.6 M weights, 2 ranks
    python tools/bench/e2e.py --size 5m --rounds 3

ours    train_rl: vLLM in the training processes, Megatron's update, the weights resharded
plain   a script without a framework: transformers' generate, one padded forward and backward pass,
        AdamW, gradients averaged over the ranks

Both sides have the same weights, prompts, samples per step, response limit, temperature 1, reward,
AdamW, fp32, no KL term, one optimizer step per batch, one thread per rank, data parallelism. A
short supervised warm start comes first, so that responses end and their lengths differ (with
--warm-steps 0 all are as long as the limit). tokens/s is sampled tokens over the time of whole
steps, without the first two steps of a run. Bytes are those that ours moves per weight sync. The
floor of a step is the time of the update's matrix products alone, at the rate of a bare product.
The last line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import torch
import torch.distributed as dist

from bench.jobs import parser_of, print_result, torchrun

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "0.6m": {"hidden_size": 128, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4, "ffn": 384},
    "5m": {"hidden_size": 256, "num_layers": 6, "num_heads": 8, "num_kv_heads": 8, "ffn": 768},
}
WARM_STEPS = 2
LR = 1e-5


def share_of_digits(response: str) -> float:
    """Return the reward of a response on both sides, its fraction of digits."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def command_line() -> argparse.Namespace:
    """Read the flags; ``--plain-in`` is given to the ranks of the plain loop."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=tuple(SIZES), default="0.6m")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks (2)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step (16)")
    parser.add_argument("--group-size", type=int, default=8, help="samples per prompt (8)")
    parser.add_argument("--response-length", type=int, default=128, help="tokens (128)")
    parser.add_argument("--steps", type=int, default=8, help="steps of one run (8)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side (2)")
    parser.add_argument("--warm-steps", type=int, default=120, help="supervised steps (120)")
    parser.add_argument("--plain-in", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARM_STEPS:
        parser.error(f"--steps {args.steps}: must be above {WARM_STEPS}, which are left out")
    if args.prompts % args.ranks:
        parser.error(f"--ranks {args.ranks}: must divide --prompts {args.prompts}")
    return args


def prepare(folder: Path, args: argparse.Namespace) -> None:
    """Write the model, prompts and reward that both sides use."""
    from make_task_data import generate_task, write_jsonl
    from make_tiny_model import write_tiny_model

    model = folder / ("random" if args.warm_steps else "model")
    write_tiny_model(model, **SIZES[args.size])
    write_jsonl(folder / "rl.jsonl", generate_task("word_problem", args.prompts * args.steps, 1))
    if args.warm_steps:
        write_jsonl(folder / "sft.jsonl", generate_task("word_problem", 4000, 2))
        torchrun(
            args.ranks, "-m", "mindspeed_rl.pretrain", "--platform", "cpu",
            "--hf-checkpoint", str(model), "--sft-data", f"{folder}/sft.jsonl",
            "--train-iters", str(args.warm_steps),
            "--global-batch-size", "64", "--micro-batch-size", "32", "--lr", "2e-3",
            "--lr-warmup-iters", "20", "--output-dir", f"{folder}/warm",
            "--export-hf", f"{folder}/model", quiet=True,
        )  # fmt: skip
    (folder / "reward.py").write_text(
        f"{inspect.getsource(share_of_digits)}\n"
        "def reward(request):\n"
        "    return share_of_digits(request.response)\n"
    )


def run_ours(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Run train_rl once and return its figures."""
    samples = args.prompts * args.group_size
    torchrun(
        args.ranks, "-m", "mindspeed_rl.train_rl", "--platform", "cpu",
        "--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "rl.jsonl"),
        "--train-iters", str(args.steps), "--grpo-prompts-per-step", str(args.prompts),
        "--grpo-group-size", str(args.group_size), "--micro-batch-size", str(samples // args.ranks),
        "--max-prompt-length", "192", "--rollout-max-response-length", str(args.response_length),
        "--rollout-kv-cache-gb", "0.5", "--vllm-max-num-seqs", str(samples), "--lr", str(LR),
        "--use-distributed-optimizer", "--reward-function", f"{folder / 'reward.py'}:reward",
        "--output-dir", str(folder / "ours"), "--overwrite-output-dir", quiet=True,
    )  # fmt: skip
    lines = (folder / "ours" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step_s" in row]
    seconds = [row["time/step_s"] for row in rows]
    tokens = [row["throughput/tokens_per_s"] * row["time/step_s"] for row in rows]
    sync_bytes = rows[-1].get("reshard/bytes_received", 0)
    return figures(list(zip(seconds, tokens, strict=True)), sync_bytes)


def run_plain(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Run :func:`plain_rank` once on all ranks and return its figures."""
    numbers = ("prompts", "group_size", "response_length", "steps", "ranks")
    flags = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in numbers]
    torchrun(args.ranks, __file__, f"--plain-in={folder}", *flags, quiet=True)
    return figures(json.loads((folder / "plain.json").read_text()), sync_bytes=0)


def figures(steps: Sequence[tuple[float, float]], sync_bytes: float) -> dict[str, float]:
    """Return the figures of a run from the seconds and sampled tokens of each step."""
    seconds, tokens = zip(*steps[WARM_STEPS:], strict=True)
    return {
        "tokens_per_s": sum(tokens) / sum(seconds),
        "tokens_per_step": statistics.fmean(tokens),
        "step_s": statistics.median(seconds),
        "sync_bytes": sync_bytes,  # of the rank that receives the most
    }


def plain_rank(args: argparse.Namespace) -> None:
    """Run the plain loop on one rank; rank 0 writes seconds and tokens of every step to a file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    tokenizer = AutoTokenizer.from_pretrained(args.plain_in / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.plain_in / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    rows = [json.loads(line) for line in (args.plain_in / "rl.jsonl").read_text().splitlines()]
    ends, tokens = [time.perf_counter()], []
    for step in range(args.steps):
        mine = rows[step * args.prompts : (step + 1) * args.prompts][rank::world]
        texts = [
            tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
            for row in mine
        ]
        asked = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        width = asked["input_ids"].shape[1]
        with torch.no_grad():
            ids = model.generate(
                **asked, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=args.response_length, num_return_sequences=args.group_size,
            )  # fmt: skip
        said = ids[:, width:]
        ended = (said == tokenizer.eos_token_id).long()
        mask = (ended.cumsum(1) - ended == 0).float()  # up to and including the end token
        responses = tokenizer.batch_decode(said, skip_special_tokens=True)
        scores = torch.tensor([share_of_digits(text) for text in responses])
        grouped = scores.view(-1, args.group_size)
        spread = grouped.std(dim=1, keepdim=True) + 1e-6
        advantages = ((grouped - grouped.mean(dim=1, keepdim=True)) / spread).view(-1, 1)
        before = asked["attention_mask"].repeat_interleave(args.group_size, dim=0)
        attended = torch.cat([before, mask.long()], dim=1)
        logits = model(ids, attention_mask=attended).logits[:, width - 1 : -1]
        logp = logits.log_softmax(-1).gather(-1, said[..., None])[..., 0]
        count = mask.sum()
        dist.all_reduce(count)
        loss = -(advantages * (logp - logp.detach()).exp() * mask).sum() / count
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        ends.append(time.perf_counter())
        tokens.append(int(count))
    if rank == 0:
        seconds = [after - before for before, after in pairwise(ends)]
        steps = list(zip(seconds, tokens, strict=True))
        (args.plain_in / "plain.json").write_text(json.dumps(steps))
    dist.barrier()
    dist.destroy_process_group()


def update_floor_s(folder: Path, args: argparse.Namespace, tokens_per_step: float) -> float:
    """Return the seconds of the update's matrix products: 3 forward passes at the measured rate."""
    from transformers import AutoTokenizer

    from mindspeed_rl.data.cache import RowCache
    from mindspeed_rl.data.prompts import load_prompts
    from mindspeed_rl.models.flops import active_parameters, attention_flops
    from mindspeed_rl.models.registry import spec_from_hf_config

    config = json.loads((folder / "model" / "config.json").read_text())
    spec = spec_from_hf_config(config)
    prompts = load_prompts(
        folder / "rl.jsonl",
        AutoTokenizer.from_pretrained(folder / "model"),
        max_prompt_length=192,
        vocab_size=spec.vocab_size,
        cache=RowCache(str(folder / "cache")),
    )
    samples = args.prompts * args.group_size
    length = float(prompts.num_tokens().mean()) + tokens_per_step / samples
    torch.set_num_threads(1)
    rows = torch.randn(8192, config["hidden_size"])
    weight = torch.randn(config["hidden_size"], config["intermediate_size"])
    taken = []
    for _ in range(10):
        begin = time.perf_counter()
        rows @ weight
        taken.append(time.perf_counter() - begin)
    rate = args.ranks * 2.0 * rows.numel() * weight.shape[1] / min(taken)
    per_token = 2 * active_parameters(spec) + attention_flops(spec, length)
    return float(3 * samples * length * per_token / rate)


def main() -> None:
    """Race both sides and report the result, or run as a rank of the plain loop."""
    args = command_line()
    if args.plain_in:
        plain_rank(args)
        return
    sides = {"ours": run_ours, "plain": run_plain}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory(prefix="e2e-bench-") as name:
        folder = Path(name)
        prepare(folder, args)
        for number in range(args.rounds):
            for side, run in sides.items():
                rounds[side].append(run(folder, args))
                last = rounds[side][-1]
                print(
                    f"round {number + 1} {side:5} {last['tokens_per_s']:9.0f} tokens/s, step "
                    f"{last['step_s']:.3f} s of {last['tokens_per_step']:.0f} tokens", flush=True,
                )  # fmt: skip
        last = rounds["ours"][-1]
        floor = update_floor_s(folder, args, last["tokens_per_step"])
    best = {side: max(r["tokens_per_s"] for r in runs) for side, runs in rounds.items()}
    ratio = best["ours"] / best["plain"]
    print(
        f"best of each: ours {best['ours']:.0f}, plain {best['plain']:.0f} tokens/s: {ratio:.2f} x"
    )
    print(
        f"a weight sync brings a rank {last['sync_bytes'] / 1e6:.1f} MB; floor of a step, the "
        f"matrix products of its update: {floor:.3f} s of {last['step_s']:.3f} s"
    )
    print_result("e2e", size=args.size, ratio=ratio, floor_s=floor, rounds=rounds)


if __name__ == "__main__":
    main()
