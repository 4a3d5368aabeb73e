"""Whole GRPO steps through our loop and through TRL's GRPOTrainer, alternating, in one run.

    pip install --no-deps trl==1.16.0 accelerate        # the baseline; not a dependency of ours
    python tools/bench/e2e.py                           # a model of 0.6 M weights
    python tools/bench/e2e.py --size 5m

Both sides: the same weights, prompts, samples per step, response limit, temperature 1, reward,
AdamW, fp32, no KL term, one optimizer step per batch, one thread per rank, the same ranks (data
parallel). A short supervised warm start comes first, so that responses end and their lengths
differ, as they do in practice; without it (--warm-steps 0) all are as long as the limit. Ours
samples with vLLM in the training processes; TRL with transformers' generate, which is what it has
on a CPU here (its vLLM mode asks for other versions of vLLM).

tokens/s is sampled tokens by the time of whole steps: rollout, reward, update and everything
between. The parts of both sides are told, and the time of the update's matrix products alone at the
rate that a bare one reaches. The first two steps of a run are left out, start-up is told apart.
--operators adds one run of each side whose last step is traced, and tells the seconds of its update
on rank 0 by kind of operator. The last line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # the package of benchmarks
    sys.path[0] = str(ROOT / "tools")
from bench.operators import seconds_by_kind  # noqa: E402

SIZES: dict[str, dict[str, int]] = {
    "0.6m": {"hidden_size": 128, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4, "ffn": 384},
    "5m": {"hidden_size": 256, "num_layers": 6, "num_heads": 8, "num_kv_heads": 8, "ffn": 768},
}
WARM_STEPS = 2
REWARD = "share_of_digits"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=tuple(SIZES), default="0.6m")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks (2)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step (16)")
    parser.add_argument("--group-size", type=int, default=8, help="samples per prompt (8)")
    parser.add_argument("--response-length", type=int, default=128, help="tokens (128)")
    parser.add_argument("--steps", type=int, default=8, help="steps of one run (8)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side (2)")
    parser.add_argument("--warm-steps", type=int, default=120, help="supervised steps (120)")
    parser.add_argument("--operators", action="store_true", help="trace a step of both sides")
    args = parser.parse_args(argv)
    if args.steps <= WARM_STEPS:
        parser.error(f"--steps {args.steps}: must be above {WARM_STEPS}, which are left out")
    if args.prompts * args.group_size % args.ranks:
        parser.error(f"--ranks {args.ranks}: must divide the samples of a step")
    return args


def prepare(folder: Path, args: argparse.Namespace) -> None:
    """Model, prompts and reward of both sides."""
    from make_tiny_model import write_tiny_model

    sizes = cast(dict[str, Any], SIZES[args.size])
    model = write_tiny_model(folder / ("model" if not args.warm_steps else "random"), **sizes)
    make = [sys.executable, str(ROOT / "tools" / "make_task_data.py"), "--task", "word_problem"]
    for rows, name, seed in ((args.prompts * args.steps, "rl", 1), (4000, "sft", 2)):
        data = ["--num-rows", str(rows), "--seed", str(seed), "--output", f"{folder}/{name}.jsonl"]
        subprocess.run([*make, *data], check=True, stdout=subprocess.DEVNULL)
    if args.warm_steps:
        torchrun(args, [
            "-m", "mindspeed_rl.pretrain", "--platform", "cpu", "--hf-checkpoint", str(model),
            "--sft-data", f"{folder}/sft.jsonl", "--train-iters", str(args.warm_steps),
            "--global-batch-size", "64", "--micro-batch-size", "32", "--lr", "2e-3",
            "--lr-warmup-iters", "20", "--output-dir", f"{folder}/warm",
            "--export-hf", f"{folder}/model",
        ])  # fmt: skip
    (folder / "reward.py").write_text(
        f"def {REWARD}(request):\n"
        "    return sum(c.isdigit() for c in request.response) / max(1, len(request.response))\n"
    )


def torchrun(args: argparse.Namespace, target: list[str]) -> float:
    """Run on all ranks; seconds. Ends with the output of a run that failed."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(args.ranks), *target]
    begin = time.perf_counter()
    done = subprocess.run(
        command, env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-4000:]}\nended with {done.returncode}")
    return time.perf_counter() - begin


def run_ours(folder: Path, args: argparse.Namespace, trace: Path | None = None) -> dict[str, Any]:
    """One run of train_rl; ``trace``: where that of rank 0 in the last step goes."""
    samples = args.prompts * args.group_size
    seconds = torchrun(args, [
        "-m", "mindspeed_rl.train_rl", "--platform", "cpu",
        "--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "rl.jsonl"),
        "--train-iters", str(args.steps), "--grpo-prompts-per-step", str(args.prompts),
        "--grpo-group-size", str(args.group_size), "--micro-batch-size", str(samples // args.ranks),
        "--max-prompt-length", "128", "--rollout-max-response-length", str(args.response_length),
        "--rollout-kv-cache-gb", "0.5", "--vllm-max-num-seqs", str(samples), "--lr", "1e-5",
        "--use-distributed-optimizer", "--reward-function", f"{folder / 'reward.py'}:{REWARD}",
        "--output-dir", str(folder / "ours"), "--overwrite-output-dir",
        *([] if trace is None else [
            "--profile", "--profile-step-start", str(args.steps),
            "--profile-step-end", str(args.steps + 1), "--profile-save-path", str(trace.parent),
        ]),
    ])  # fmt: skip
    if trace is not None:
        next(trace.parent.glob("rank0_*.json")).replace(trace)
    lines = (folder / "ours" / "metrics.jsonl").read_text().splitlines()
    steps = [r for r in map(json.loads, lines) if "time/step_s" in r][WARM_STEPS:]
    tokens = sum(r["throughput/tokens_per_s"] * r["time/step_s"] for r in steps)
    phases = [name for name in steps[0] if re.fullmatch(r"time/\w+_s", name)]
    return {
        "tokens_per_s": tokens / sum(r["time/step_s"] for r in steps),
        "tokens_per_step": tokens / len(steps),
        "step_s": statistics.median(r["time/step_s"] for r in steps),
        "phases_s": {name[5:-2]: statistics.median(r[name] for r in steps) for name in phases},
        "whole_run_s": seconds,
    }


def run_trl(folder: Path, args: argparse.Namespace, trace: Path | None = None) -> dict[str, Any]:
    """One run of GRPOTrainer; see ``trl_side.py``. ``trace`` as in :func:`run_ours`."""
    side = Path(__file__).with_name("trl_side.py")
    result = folder / "trl.json"
    numbers = (args.prompts, args.group_size, args.response_length, args.steps)
    where = "" if trace is None else str(trace)
    seconds = torchrun(args, [str(side), str(folder), str(result), *map(str, numbers), where])
    found = json.loads(result.read_text())
    steps = found["steps"][WARM_STEPS:]
    total = sum(step["seconds"] for step in steps)
    tokens = sum(step["tokens"] for step in steps)
    names = steps[0]["parts"]
    return {
        "tokens_per_s": tokens / total,
        "tokens_per_step": tokens / len(steps),
        "step_s": statistics.median(step["seconds"] for step in steps),
        "phases_s": {n: statistics.median(step["parts"][n] for step in steps) for n in names},
        "whole_run_s": seconds,
    }


def matmul_flops_per_s(hidden: int, ffn: int) -> float:
    """Of one thread, fp32, in the model's largest shape: the best of ten."""
    import torch

    torch.set_num_threads(1)
    rows, weight = torch.randn(8192, hidden), torch.randn(hidden, ffn)
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        rows @ weight
        seconds.append(time.perf_counter() - begin)
    return 2.0 * rows.numel() * ffn / min(seconds)


def training_floor_s(folder: Path, args: argparse.Namespace, response: float) -> float:
    """Seconds of the update's matrix products alone: three forward passes at the measured rate.

    Args:
        folder: with model and prompts.
        args: the command line.
        response: mean tokens of a response.
    """
    from transformers import AutoTokenizer

    from mindspeed_rl.data.prompts import load_prompts
    from mindspeed_rl.models.flops import forward_flops
    from mindspeed_rl.models.registry import spec_from_hf_config

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    spec = spec_from_hf_config(json.loads((folder / "model" / "config.json").read_text()))
    prompts = load_prompts(
        folder / "rl.jsonl", tokenizer, max_prompt_length=128, vocab_size=spec.vocab_size
    )
    length = statistics.fmean(len(p.token_ids) for p in prompts) + response
    sizes = SIZES[args.size]
    with ProcessPoolExecutor(args.ranks, get_context("spawn")) as pool:  # all ranks at a time
        hidden, ffn = [sizes["hidden_size"]] * args.ranks, [sizes["ffn"]] * args.ranks
        rate: float = sum(pool.map(matmul_flops_per_s, hidden, ffn))
    tokens = args.prompts * args.group_size * length
    return float(3 * tokens * forward_flops(spec, length) / rate)


def trace_updates(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds of one update of both sides by kind of operator; prints them."""
    sides = {"ours": (run_ours, "phase train"), "trl": (run_trl, "forward_backward")}
    found = {}
    for side, (run, stretch) in sides.items():
        (folder / "trace").mkdir(exist_ok=True)
        trace = folder / "trace" / f"{side}.json"
        run(folder, args, trace)
        found[side] = seconds_by_kind(trace, stretch)
        told = ", ".join(f"{kind} {s:.3f}" for kind, s in found[side].items())
        print(f"{side:5} {stretch} under the profiler {sum(found[side].values()):.3f} s: {told}")
    return found


def main() -> int:
    """Race and report."""
    args = parse()
    missing = [n for n in ("trl", "accelerate") if importlib.util.find_spec(n) is None]
    if missing:
        sys.exit(f"e2e.py: {' and '.join(missing)} missing; see the first lines of --help")
    sides = {"ours": run_ours, "trl": run_trl}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory(prefix="e2e-bench-") as name:
        folder = Path(name)
        prepare(folder, args)
        for number in range(args.rounds):
            for side, run in sides.items():
                rounds[side].append(run(folder, args))
                last = rounds[side][-1]
                print(
                    f"round {number + 1} {side:5} {last['tokens_per_s']:9.0f} tokens/s, step "
                    f"{last['step_s']:.3f} s of {last['tokens_per_step']:.0f} tokens, whole run "
                    f"{last['whole_run_s']:.0f} s", flush=True,
                )  # fmt: skip
        last = rounds["ours"][-1]
        response = last["tokens_per_step"] / (args.prompts * args.group_size)
        floor = training_floor_s(folder, args, response)
        operators = trace_updates(folder, args) if args.operators else {}
    best = {side: max(r["tokens_per_s"] for r in runs) for side, runs in rounds.items()}
    ratio = best["ours"] / best["trl"]
    print(f"best of each: ours {best['ours']:.0f}, TRL {best['trl']:.0f} tokens/s: {ratio:.2f} x")
    for side, runs in rounds.items():
        parts = ", ".join(f"{k} {v:.3f}" for k, v in runs[-1]["phases_s"].items())
        print(f"{side:5} {runs[-1]['step_s']:.3f} s: {parts}")
    print(f"matrix products of the update, at the rate that a bare one reaches: {floor:.3f} s")
    record = {
        "bench": "e2e", "size": args.size, "ratio": ratio, "training_floor_s": floor,
        "rounds": rounds, "operators": operators,
    }  # fmt: skip
    print("RESULT " + json.dumps(record), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
