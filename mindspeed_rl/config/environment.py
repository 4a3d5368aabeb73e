"""Flags of conversations with an environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.config.reward_spec import built_in, check_name
from mindspeed_rl.core.flag import flag
from mindspeed_rl.core.user_files import check_python_name

BUILT_IN_ENVIRONMENTS = built_in("environments")


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """Environments.

    With an environment a response has several turns: the model speaks until a stop token, the
    environment answers in tokens, and so on. Tokens of the environment are read and never trained
    on. ``--rollout-max-response-length`` is the limit of all turns together. The reward
    ``environment`` is what the environment says; the other rewards see what the model said, and the
    whole conversation as ``transcript`` in their metadata.

    Example: --rl-environment calculator --reward-function environment
    """

    rl_environment: str = flag(
        "",
        "An environment: a built-in one or FILE.py:NAME; empty for none. Built in: "
        + "; ".join(f"{name} ({text})" for name, text in BUILT_IN_ENVIRONMENTS.items())
        + ".",
    )
    rl_environment_max_turns: int = flag(
        4, "Turns of the model in one response; it is cut after them.", minimum=1
    )
    rl_environment_ray_workers: int = flag(
        0,
        "Ray actors per engine in which environments run side by side, anywhere in the cluster of "
        "--orchestrator ray; 0: in the process that leads the engine, one turn after the other.",
        minimum=0,
    )


def check_environment(flags: EnvironmentConfig, *, files: bool = True) -> None:
    """Check that an environment is built in or in a Python file. Local; executes nothing.

    Args:
        flags: Flags of the environment.
        files: Whether the user's file must be there.

    Raises:
        UsageError: The message names the flag, its value and the fix.
    """
    name = flags.rl_environment
    path, separator, attribute = name.rpartition(":")
    where = f"--rl-environment {name}"
    if separator and files:
        check_python_name(Path(path), attribute, where)
    elif name and not separator:
        check_name("--rl-environment", name, BUILT_IN_ENVIRONMENTS)
