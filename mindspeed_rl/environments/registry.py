"""From an environment's name on the command line to its factory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from mindspeed_rl.environments.types import EnvironmentFactory
from mindspeed_rl.rewards.user_file import load_from_file

_REGISTRY: dict[str, EnvironmentFactory] = {}


def register_environment(name: str) -> Callable[[EnvironmentFactory], EnvironmentFactory]:
    """Decorator that makes a factory (a class will do) available as the environment ``name``.

    Raises:
        ValueError: the name is malformed or taken.
    """
    if not name or ":" in name or name in _REGISTRY:
        raise ValueError(f"environment name {name!r}: must be new, non-empty, without ':'")

    def register(factory: EnvironmentFactory) -> EnvironmentFactory:
        _REGISTRY[name] = factory
        return factory

    return register


def known_environments() -> tuple[str, ...]:
    """Registered names, sorted."""
    return tuple(sorted(_REGISTRY))


def resolve_environment(name: str) -> EnvironmentFactory:
    """The factory of a registered name or of ``path/to/file.py:Name``.

    Raises:
        ValueError: unknown name; missing file or name; something that cannot be called.
    """
    path, separator, attribute = name.rpartition(":")
    where = f"--rl-environment {name}"
    if separator:
        factory = load_from_file(Path(path), attribute, where)
        if not callable(factory):
            raise ValueError(f"{where}: is a {type(factory).__name__}, must be a class or function")
        return cast(EnvironmentFactory, factory)
    if name in _REGISTRY:
        return _REGISTRY[name]
    raise ValueError(
        f"{where}: unknown environment; known: {', '.join(known_environments())}; for your own "
        "write path/to/file.py:Name"
    )
