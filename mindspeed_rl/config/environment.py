"""Flags of conversations with an environment."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config.reward_spec import built_in
from mindspeed_rl.core.flag import Needs, flag

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
        4,
        "Turns of the model in one response; it is cut after them.",
        minimum=1,
        needs=Needs("--rl-environment"),
    )
    rl_environment_threads: int = flag(
        8,
        "Threads of the process that leads an engine, in which environments answer side by side "
        "while the engine generates; with --rl-environment-ray-workers actors do. 0: the engine "
        "waits for every answer, of actors too, and runs repeat to the bit, because a turn then "
        "always joins the same turns of others.",
        minimum=0,
        needs=Needs("--rl-environment"),
    )
    rl_environment_ray_workers: int = flag(
        0,
        "Ray actors per engine in which environments run side by side, anywhere in the cluster of "
        "--orchestrator ray; 0: in threads of the process that leads the engine.",
        minimum=0,
        needs=Needs("--rl-environment"),
    )
