"""Fits the constants of step times to one published run, and predicts the others with them.

    python tools/bench/published_steps.py

The runs are those of the CANN recipes on Atlas A3. Of each the recipe of pretrain_scripts with its
layout, batch and lengths is dry-run, with rows padded to the longest of an optimizer step: those
recipes do not pack. What was not published is stated in the notes and assumed. A published value
outside the predicted range is marked WRONG. The last line is RESULT and a JSON object.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401

from bench.jobs import ROOT, parser_of, print_result
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.tables import aligned
from mindspeed_rl.packing.micro_batches import PackingEstimate
from mindspeed_rl.planning.budget import machine_on
from mindspeed_rl.planning.findings import predicted_lengths
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.run_plan import run_packing
from mindspeed_rl.planning.step_time import SPEEDS, PhaseSeconds, Speed, StepSeconds, step_seconds
from mindspeed_rl.planning.suggestions import plan_of

MACHINE = "a3"
PADDED = ("--max-tokens-per-micro-batch", "0", "--equal-micro-batch-lengths")


@dataclass(frozen=True, slots=True)
class Published:
    """A published run.

    Attributes:
        recipe: Script of pretrain_scripts that follows it.
        seconds: Published seconds by phase of the dry run, and of the whole step (``sum``).
        flags: Flags that the recipe does not have.
        variables: Environment of the script.
        note: What was not published, or differs.
    """

    recipe: str
    seconds: Mapping[str, float]
    flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


_R1, _30B = "grpo_deepseek_r1_671b_a3.sh", "grpo_qwen3_30b_a3b_1node.sh"
_30B_CARDS = {"NNODES": "2", "RESPONSE_LENGTH": "16384", "GROUP_SIZE": "8", "MACHINE": MACHINE}
_16_PER_NODE = {"NPUS_PER_NODE": "16"}
RUNS = {
    "DeepSeek-R1, 256 dies": Published(
        _R1,
        {"rollout": 373.65, "reference": 144.5, "update": 319.3, "sum": 859.68},
        ("--rl-dry-run-mean-length", "1654.4"),
        note="fitted; the sum has 22 s of parts that are not counted",
    ),
    "DeepSeek-R1, random weights, fixed 3K": Published(
        _R1,
        {"rollout": 318.27, "reference": 104.7, "update": 328.8, "sum": 796.8},
        ("--rl-dry-run-mean-length", "3115"),
        {"ROLLOUT_DP": "128", "ROLLOUT_EP": "256", "PROMPT_LENGTH": "43"},
        note="length from the published tokens per second; 36 s are not counted",
    ),
    "Qwen3-235B, 128 dies": Published(
        "grpo_qwen3_235b_a22b_a3.sh",
        {"rollout": 4065.7, "reference": 1262.0, "update": 2353.0, "sum": 7780.0},
        ("--rl-dry-run-mean-length", "7418"),
        note="prompt length from the published tokens per second",
    ),
    "Qwen3-30B, 16 cards": Published(
        _30B,
        {"rollout": 1202.77, "sum": 1511.84},
        variables=_30B_CARDS | _16_PER_NODE,
        note="mean length not published: a third of the longest; 16 cards taken as 32 dies",
    ),
    "Qwen3-30B, 16 cards, drafts": Published(
        _30B,
        {"rollout": 998.65, "sum": 1213.48},
        variables=_30B_CARDS | _16_PER_NODE,
        note="with speculative decoding, which is not modelled",
    ),
}
FITTED = "DeepSeek-R1, 256 dies"


def flags_of(run: Published) -> list[str]:
    """Return the arguments that a recipe starts its entry with."""
    done = subprocess.run(
        ["bash", str(ROOT / "pretrain_scripts" / run.recipe), "--rl-dry-run"],
        env={"PATH": os.environ["PATH"], "PYTHON": "echo", **run.variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[2:]  # after -m and the entry


@cache
def _parts_of(name: str) -> tuple[MemoryPrediction, PackingEstimate, tuple[int, ...]]:
    run = RUNS[name]
    config = parse(RLRunConfig, [*flags_of(run), *PADDED, *run.flags], "bench").config
    plan = plan_of(config, config.dry_run.rl_world_size)
    lengths = predicted_lengths(config, plan)
    packing = PackingEstimate.of(run_packing(config, plan), lengths)
    return MemoryPrediction(config, plan, machine_on(config)), packing, tuple(lengths)


def predict(name: str, speed: Speed) -> dict[str, PhaseSeconds]:
    """Return the estimate of each phase of a run, and of their sum."""
    step = step_seconds(*_parts_of(name), speed)
    assert isinstance(step, StepSeconds)
    return {phase.phase: phase for phase in (*step.phases, step.whole)}


def fit(start: Speed) -> Speed:
    """Return the constants with which the phases of the fitted run come out as published."""
    published, found = RUNS[FITTED].seconds, predict(FITTED, start)
    passes = start.pass_efficiency * found["reference"].seconds / published["reference"]
    updates = start.update_efficiency * found["update"].seconds / published["update"]
    # Seconds of a rollout are linear in the time of a layer.
    none = predict(FITTED, replace(start, decode_layer_us=0.0))["rollout"].seconds
    slope = (found["rollout"].seconds - none) / start.decode_layer_us
    return replace(
        start,
        pass_efficiency=passes,
        update_efficiency=updates,
        decode_layer_us=(published["rollout"] - none) / slope,
    )


def table(speed: Speed) -> list[list[str]]:
    """Return a row for each published number."""
    rows = [["run", "phase", "published", "predicted", "range", "ratio", "verdict"]]
    for name, run in RUNS.items():
        found = predict(name, speed)
        for phase, seconds in run.seconds.items():
            at = found[phase]
            verdict = "within" if at.low <= seconds <= at.high else "WRONG"
            verdict = "fitted" if name == FITTED and phase != "sum" else verdict
            numbers = [f"{seconds:.1f}", f"{at.seconds:.1f}", f"{at.low:.0f} to {at.high:.0f}"]
            rows.append([name, phase, *numbers, f"{at.seconds / seconds:.2f}", verdict])
    return rows


def main() -> None:
    """Print the fitted constants and the table."""
    parser_of(__doc__).parse_args()
    speed = SPEEDS[MACHINE]
    fitted = fit(speed)
    names = ("update_efficiency", "pass_efficiency", "decode_layer_us")
    for name in names:
        print(f"{name}: {getattr(fitted, name):.4g} fitted, {getattr(speed, name):.4g} in use")
    rows = table(speed)
    print("\n".join(aligned(rows)))
    for name, run in RUNS.items():
        print(f"{name}: {run.note}")
    results = {
        f"{row[0]}: {row[1]}": dict(zip(rows[0][2:6], row[2:6], strict=True)) for row in rows[1:]
    }
    print_result("published_steps", **results)


if __name__ == "__main__":
    main()
