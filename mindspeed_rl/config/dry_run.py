"""Flags of the dry run, which predicts memory and volumes without starting anything."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config.machines import MACHINES
from mindspeed_rl.core.flag import flag


@dataclass(frozen=True, slots=True)
class DryRunConfig:
    """Dry run.

    Prints what a run would do and need, without devices, weights or torchrun: the batch arithmetic,
    bytes per phase and rank, what a weight update moves, whether it fits, and which single changes
    would help. All of it is predicted. It ends with code 3 when the run does not fit.

    Example: bash recipe.sh --rl-dry-run --device-memory-gb 64
    """

    rl_dry_run: bool = flag(False, "Predict the run instead of starting it.")
    rl_world_size: int = flag(
        0,
        "Ranks of the run. A dry run takes them as given (0: WORLD_SIZE of the environment); a run "
        "is refused when torchrun starts another number.",
        minimum=0,
    )
    rl_dry_run_machine: str = flag(
        "a3",
        "What a rank runs on: its platform, the memory of a device (see --device-memory-gb), and "
        "what communicators and graphs take of it. a3 is one die of an Atlas A3.",
        choices=tuple(MACHINES),
    )
    rl_dry_run_expert_imbalance: float = flag(
        1.0,
        "Tokens of the busiest expert-parallel rank as a multiple of the mean, in training and in "
        "rollouts.",
        minimum=1.0,
    )
    rl_dry_run_json: str = flag(
        "",
        "File for everything that was predicted, as JSON; - prints it instead of the report.",
        names=("--rl-dry-run-json", "--json"),
    )
