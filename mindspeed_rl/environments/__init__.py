"""Environments: the other side of conversations of several turns, on token ids."""

from mindspeed_rl.environments.chat import answer_tokens
from mindspeed_rl.environments.registry import resolve_environment
from mindspeed_rl.environments.runners import EnvironmentRunner, Failed, LocalRunner, RayRunner
from mindspeed_rl.environments.types import Environment, EnvironmentFactory, Observation

__all__ = [
    "Environment",
    "EnvironmentFactory",
    "EnvironmentRunner",
    "Failed",
    "LocalRunner",
    "Observation",
    "RayRunner",
    "answer_tokens",
    "resolve_environment",
]
