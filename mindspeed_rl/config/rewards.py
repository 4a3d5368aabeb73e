"""Flags of the rewards."""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from functools import partial
from typing import Any

from mindspeed_rl.config.reward_spec import (
    BUILT_IN_REWARDS,
    RewardSpec,
    check_name,
    check_specs,
)
from mindspeed_rl.core.errors import UsageError, check_each, refuse
from mindspeed_rl.core.flag import Needs, flag, flag_names

REMOTE_BACKOFF_S = 0.2  # first pause before --reward-url is asked again; later ones double


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """Rewards.

    Every sample is scored by the weighted sum of the reward functions, in worker processes beside
    the engines, while other samples are still being generated. A function of your own:
    ``--reward-function rewards.py:score=1.0 format=0.2``. A row of the data may name the rewards
    that score it.
    """

    reward_function: tuple[str, ...] = flag(
        ("math",),
        "Rewards, summed: a built-in one or FILE.py:FUNCTION, each may end with =WEIGHT or "
        ":WEIGHT (1 if not). Built in: "
        + "; ".join(f"{name} ({text})" for name, text in BUILT_IN_REWARDS.items())
        + ".",
        names=("--reward-function", "--rl-reward"),
        nargs="+",
    )
    reward_key: str = flag(
        "rewards",
        "Field of a data row that names the rewards which score it: one, a list, or an object of "
        "weights. Rows without it are scored by all.",
    )
    reward_model_hf_checkpoint: str = flag(
        "",
        "A sequence classifier with one label, in the training layout: its output at the last "
        "token of a sample is added to the rewards of the functions. Evaluation leaves it out.",
    )
    reward_model_weight: float = flag(
        1.0,
        "Factor of the reward model's score.",
        needs=Needs("--reward-model-hf-checkpoint"),
    )
    reward_num_workers: int = flag(1, "Reward processes per engine.", minimum=1)
    reward_timeout_s: float = flag(
        10.0, "Limit for the reward of one sample, in seconds.", minimum=0.01
    )
    reward_timeout_score: float = flag(0.0, "Reward of a sample that hit the limit.")
    reward_memory_limit_gb: float = flag(
        4.0, "Largest address space of a reward worker, in GiB.", minimum=0.1
    )
    reward_secrets: tuple[str, ...] = flag(
        (),
        "Environment variables with secrets that the reward processes get, like OPENAI_API_KEY. "
        "All others are kept from them: names with TOKEN, KEY, SECRET, PASSWORD or the like, and "
        "URLs with a password.",
        nargs="+",
    )
    reward_max_error_rate: float = flag(
        0.05,
        "Stop when a larger share of the samples raises in its reward; small batches are judged "
        "together, so that a single failure ends no run.",
        minimum=0.0,
        maximum=1.0,
    )
    reward_max_timeout_rate: float = flag(
        0.5,
        "Stop when a larger share of the samples, of at least 20, hits --reward-timeout-s; 1 never "
        "stops.",
        minimum=0.0,
        maximum=1.0,
    )
    reward_constant_steps: int = flag(
        5,
        "Warn when the rewards of all samples were one number in each of so many steps in a row; 0 "
        "never warns.",
        minimum=0,
    )
    reward_pool: str = flag(
        "auto",
        "Where rewards run: in processes of each node (process), or in Ray actors anywhere in a "
        "Ray cluster (ray), with the same limits. ray needs the extra ray. auto: ray with "
        "--orchestrator ray, else process.",
        names=("--reward-pool", "--rl-reward-pool"),
        choices=("auto", "process", "ray"),
    )
    reward_format_regex: str = flag(
        "", "Pattern of the reward format, for rows without a format_regex of their own."
    )
    reward_length_target: int = flag(
        0,
        "Tokens up to which the reward length is 1; it falls to 0 at "
        "--rollout-max-response-length.",
        minimum=0,
    )
    reward_code_time_limit_s: float = flag(
        4.0, "Limit for one test of the reward code, in seconds.", minimum=0.05
    )
    reward_code_memory_gb: float = flag(
        1.0, "Address space of each process of a tested program, in GiB.", minimum=0.05
    )
    reward_code_processes: int = flag(
        16, "Processes and threads of a tested program, where the kernel counts them.", minimum=1
    )
    reward_code_score: str = flag(
        "all",
        "Reward code: 1 when all tests pass (all), or the share that passes (fraction).",
        choices=("all", "fraction"),
    )
    reward_code_allow_open: tuple[str, ...] = flag(
        (),
        "What tested programs may reach where the kernel does not let it be closed: the network, "
        "the files of this user, its other processes. Without this consent a run with something "
        "open is refused, and says what it is.",
        choices=("network", "files", "processes"),
        nargs="+",
    )
    reward_remote_url: str = flag(
        "",
        "Server of the reward remote: samples are posted there as JSON.",
        names=("--reward-url",),
    )
    reward_remote_url_timeout_s: float = flag(
        2.0,
        "Limit of one attempt to reach --reward-url, in seconds.",
        names=("--reward-url-timeout-s",),
        minimum=0.05,
    )
    reward_remote_url_retries: int = flag(
        3,
        "Further attempts, with growing pauses, when --reward-url fails.",
        names=("--reward-url-retries",),
        minimum=0,
    )
    reward_remote_url_concurrency: int = flag(
        8,
        "Requests to --reward-url in flight at a time, per reward process; there are "
        "--reward-num-workers of those per engine.",
        names=("--reward-url-concurrency",),
        minimum=1,
    )


def check_rewards(
    flags: RewardConfig, phase_timeout_s: float, partner: str, *, files: bool = True
) -> None:
    """Check names and weights, limits within limits, and rewards that need another flag.

    Args:
        flags: Flags of the rewards.
        phase_timeout_s: Limit of all rewards of a step.
        partner: Flag and value of the environment or agent; empty: there is none.
        files: Whether the user's files must be there.

    Raises:
        UsageError: The message names the flag, its value and the fix.
    """
    specs = [RewardSpec.parse(text) for text in flags.reward_function]
    names = {spec.name for spec in specs}
    check_each(
        partial(check_specs, specs),
        *(
            partial(check_name, "--reward-function", name, BUILT_IN_REWARDS, files=files)
            for name in dict.fromkeys(spec.name for spec in specs)
        ),
        partial(_check_readers, flags, names),
        partial(_check_limits, flags, names, phase_timeout_s),
        partial(_check_partners, flags, names, partner),
    )


def _check_limits(flags: RewardConfig, names: set[str], phase_timeout_s: float) -> None:
    """Check that every limit is within the one around it."""
    sample_s = flags.reward_timeout_s
    if sample_s > phase_timeout_s:
        raise UsageError(
            f"--reward-timeout-s {sample_s:g} exceeds --phase-timeout-s {phase_timeout_s:g}, the "
            "limit of all rewards of a step; lower the former or raise the latter"
        )
    inner = {
        "code": ("--reward-code-time-limit-s", flags.reward_code_time_limit_s),
        "remote": ("--reward-url-timeout-s", flags.reward_remote_url_timeout_s),
    }
    for name, (flag_name, limit_s) in inner.items():
        if name in names and limit_s > sample_s:
            raise UsageError(
                f"{flag_name} {limit_s:g} exceeds --reward-timeout-s {sample_s:g}, the limit of "
                "the whole sample; lower the former or raise the latter"
            )
    pauses_s = REMOTE_BACKOFF_S * (2**flags.reward_remote_url_retries - 1)
    longest_s = (flags.reward_remote_url_retries + 1) * flags.reward_remote_url_timeout_s + pauses_s
    if "remote" in names and longest_s > sample_s:
        raise UsageError(
            f"--reward-url-timeout-s {flags.reward_remote_url_timeout_s:g} --reward-url-retries "
            f"{flags.reward_remote_url_retries}: a server that hangs takes {longest_s:g} s, which "
            f"exceeds --reward-timeout-s {sample_s:g}: the sample would get --reward-timeout-score "
            "instead of an error; lower one of the former or raise the latter"
        )


def _check_partners(flags: RewardConfig, names: set[str], partner: str) -> None:
    """Refuse a reward that asks somebody who is not there."""
    if "remote" in names and not flags.reward_remote_url:
        raise UsageError("--reward-function remote needs --reward-url: the server to ask")
    if "environment" in names and not partner:
        raise UsageError(
            "--reward-function environment needs --rl-environment: a name or FILE.py:NAME; or "
            "--rl-agent FILE.py:FUNCTION"
        )


def fields_of(reward: str) -> list[Field[Any]]:
    """The flags that only this built-in reward reads: their fields begin with its name.

    A field that begins with the names of several rewards belongs to the longest.
    """

    def owner(field: Field[Any]) -> str:
        names = (name for name in BUILT_IN_REWARDS if field.name.startswith(f"reward_{name}_"))
        return max(names, key=len, default="")

    return [field for field in fields(RewardConfig) if owner(field) == reward]


def _check_readers(flags: RewardConfig, names: set[str]) -> None:
    """Refuse a flag of a built-in reward that the run does not have."""
    refuse(
        f"{flag_names(field)[0]} {getattr(flags, field.name)} has no effect without "
        f"--reward-function {reward}; add the reward, or remove the flag"
        for reward in BUILT_IN_REWARDS
        for field in fields_of(reward)
        if reward not in names and getattr(flags, field.name) != field.default
    )
