"""Flags of conversations with an environment."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.config.flag import flag
from mindspeed_rl.config.reward_spec import check_python_file, check_python_name

# What mindspeed_rl.environments registers.
BUILT_IN_ENVIRONMENTS = ("calculator",)


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
        "", "An environment: a registered name or FILE.py:NAME; empty for none."
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
    """A registered name, or a name of a Python file that is there. Local; executes nothing.

    Args:
        flags: of the environment.
        files: whether the user's file must be there.

    Raises:
        ValueError: naming the flag, its value and the fix.
    """
    name = flags.rl_environment
    path, separator, attribute = name.rpartition(":")
    where = f"--rl-environment {name}"
    if separator and files:
        check_python_file(Path(path), where)
        check_python_name(Path(path), attribute, where)
    elif name and not separator and name not in BUILT_IN_ENVIRONMENTS:
        near = difflib.get_close_matches(name, BUILT_IN_ENVIRONMENTS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"{where}: unknown environment; {hint}known: {', '.join(BUILT_IN_ENVIRONMENTS)}; for "
            "your own write path/to/file.py:Name"
        )
