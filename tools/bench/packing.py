"""Counts the tokens that recipes train on, per real token, with drawn lengths. Runs on one core.

    python tools/bench/packing.py

padded  every micro-batch has --micro-batch-size sequences and the length of the step's longest
now     the plan of the run: packed rows, each with its own length
floor   1: nothing but the tokens of the samples

Responses are drawn from a log-normal distribution (sigma 0.9) with a published mean, cut at the
limit of the recipe or at 32K. The last columns are the tokens of the busiest expert-parallel rank
over the mean of real tokens, if the router is even and padding goes to one set of experts on
different ranks (padded), or to all experts in turn (now). The last line
is RESULT and a JSON object.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401

from bench.jobs import ROOT, parser_of, print_result
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.tables import aligned
from mindspeed_rl.packing.micro_batches import PackingRules, drawn_lengths, real_share
from mindspeed_rl.planning.run_plan import RLPlan, run_packing
from mindspeed_rl.planning.suggestions import plan_of


@dataclass(frozen=True, slots=True)
class Drawn:
    """A recipe with lengths as published for it.

    Attributes:
        recipe: Script of pretrain_scripts.
        prompt: Mean tokens of a prompt.
        response: Mean tokens of a response.
        variables: Environment of the script.
    """

    recipe: str
    prompt: int
    response: int
    variables: tuple[tuple[str, str], ...] = ()


CASES = {
    "DeepSeek-R1": Drawn("grpo_deepseek_r1_671b_a3.sh", 78, 1577),
    "Qwen3-235B": Drawn("grpo_qwen3_235b_a22b_a3.sh", 100, 7345),
    "Qwen3-30B": Drawn("grpo_qwen3_30b_a3b_1node.sh", 100, 3000, (("RESPONSE_LENGTH", "8192"),)),
    "Qwen2.5-7B": Drawn("grpo_qwen2_5_7b_1node.sh", 100, 700),
    "Qwen2.5-7B, 32K": Drawn(
        "grpo_qwen2_5_7b_1node.sh", 100, 7345, (("RESPONSE_LENGTH", "31744"),)
    ),
}


def flags_of(case: Drawn) -> list[str]:
    """Return the arguments that a recipe starts its entry with."""
    script = ROOT / "pretrain_scripts" / case.recipe
    environment = {"PATH": os.environ["PATH"], "PYTHON": "echo", **dict(case.variables)}
    done = subprocess.run(
        ["bash", str(script), "--rl-dry-run"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[2:]  # after -m and the entry


def measure(case: Drawn) -> dict[str, float]:
    """Plan one optimizer step of a recipe, padded as earlier and as it is planned now."""
    config = parse(RLRunConfig, flags_of(case), "bench").config
    plan = plan_of(config, config.dry_run.rl_world_size)
    assert isinstance(plan, RLPlan)
    longest = config.rollout.rollout_max_response_length
    responses = drawn_lengths(plan.batch.samples_per_update, case.response, longest)
    lengths = [case.prompt + n for n in responses]
    now = run_packing(config, plan)
    padded = replace(now, max_tokens=0, equal_lengths=True)
    found = {"padded": travelling(padded, lengths), "now": travelling(now, lengths)}
    moe = plan.spec.moe
    if moe:
        ep = plan.parallel.ep
        per_rank = max(1.0, ep / moe.top_k)  # of k experts on k ranks: each over the mean
        found["busiest_padded"] = 1 + (found["padded"] - 1) * per_rank
        found["busiest_now"] = found["now"]  # every rank has its share of the padding
    return found


def travelling(rules: PackingRules, lengths: list[int]) -> float:
    """Return the tokens that travel per real one."""
    return 1 / real_share([rules.assign(lengths)], lengths)


def main() -> None:
    """Print the table."""
    parser_of(__doc__).parse_args()
    results = {name: measure(case) for name, case in CASES.items()}
    columns = ("padded", "now", "busiest_padded", "busiest_now")
    rows = [["tokens per real one", "padded", "now", "floor", "busiest, padded", "busiest, now"]]
    for name, found in results.items():
        cells = [f"{found[c]:.3f}" if c in found else "-" for c in columns]
        rows.append([name, *cells[:2], "1", *cells[2:]])
    print("\n".join(aligned(rows)))
    print_result("packing", **results)


if __name__ == "__main__":
    main()
