"""Environments: conversations of several turns, on token ids."""

from mindspeed_rl.environments.calculator import Calculator
from mindspeed_rl.environments.chat import answer_tokens
from mindspeed_rl.environments.hosts import Failed, Host, LocalHost, RayHost
from mindspeed_rl.environments.registry import (
    known_environments,
    register_environment,
    resolve_environment,
)
from mindspeed_rl.environments.types import Environment, EnvironmentFactory, Observation

__all__ = [
    "Calculator",
    "Environment",
    "EnvironmentFactory",
    "Failed",
    "Host",
    "LocalHost",
    "Observation",
    "RayHost",
    "answer_tokens",
    "known_environments",
    "register_environment",
    "resolve_environment",
]
