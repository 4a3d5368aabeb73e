"""Flags of the dry run: memory, volumes and seconds before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config.flag import flag


@dataclass(frozen=True, slots=True)
class DryRunConfig:
    """Dry run.

    Prints what a run would do and need, without devices, weights or torchrun: the batch arithmetic,
    bytes per phase and rank, what a weight update moves, an estimate of seconds, whether it fits,
    and what would make it smaller. All of it is predicted. It ends with code 3 when the run does
    not fit.

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
        "What a rank runs on: a3 (one die), a2, h200, cpu, or a .toml file with the keys of "
        "mindspeed_rl/dryrun/machines.toml.",
    )
    rl_dry_run_expert_imbalance: float = flag(
        1.0,
        "Tokens of the busiest expert-parallel rank as a multiple of the mean, in training and in "
        "rollouts.",
        minimum=1.0,
    )
    rl_dry_run_mean_prompt_length: float = flag(
        0.0, "Mean prompt for the seconds, in tokens; 0 takes --max-prompt-length.", minimum=0.0
    )
    rl_dry_run_mean_response_length: float = flag(
        0.0,
        "Mean response for the seconds, in tokens; 0 takes --rollout-max-response-length.",
        minimum=0.0,
    )
    rl_dry_run_json: str = flag(
        "",
        "File for everything that was predicted, as JSON; - prints it instead of the report.",
        names=("--rl-dry-run-json", "--json"),
    )
