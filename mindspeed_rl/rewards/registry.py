"""From a reward's name on the command line to its function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mindspeed_rl.config.reward_spec import RewardSpec, check_name
from mindspeed_rl.rewards.settings import RewardSettings
from mindspeed_rl.rewards.types import RewardFunction
from mindspeed_rl.rewards.user_file import load_from_file

RewardFactory = Callable[[RewardSettings], RewardFunction]


@dataclass(frozen=True, slots=True)
class _Registered:
    make: RewardFactory
    warm_up: Callable[[], object] | None


_REGISTRY: dict[str, _Registered] = {}


def register_reward(
    name: str, *, warm_up: Callable[[], object] | None = None
) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator that makes a function available as the reward ``name``.

    Args:
        name: how users select it; no ``:``, ``=`` or ``,``.
        warm_up: called once per worker before the first sample, so that slow imports do not count
            against the time limit of a sample.

    Raises:
        ValueError: the name is malformed or taken.
    """
    _check_name(name)

    def register(function: RewardFunction) -> RewardFunction:
        _add(name, _Registered(lambda _: function, warm_up))
        return function

    return register


def register_factory(name: str) -> Callable[[RewardFactory], RewardFactory]:
    """Decorator for a reward that depends on the reward flags.

    The decorated function is called once per worker; it may raise `ValueError`.

    Raises:
        ValueError: the name is malformed or taken.
    """
    _check_name(name)

    def register(factory: RewardFactory) -> RewardFactory:
        _add(name, _Registered(factory, None))
        return factory

    return register


def _check_name(name: str) -> None:
    if not name or any(character in name for character in ":=,"):
        raise ValueError(f"reward name {name!r}: must be non-empty, without ':', '=' and ','")


def _add(name: str, registered: _Registered) -> None:
    if name in _REGISTRY:
        raise ValueError(f"reward name {name!r} is already registered; choose another name")
    _REGISTRY[name] = registered


def known_rewards() -> tuple[str, ...]:
    """Registered names, sorted."""
    return tuple(sorted(_REGISTRY))


def resolve_reward(
    spec: RewardSpec | str, settings: RewardSettings | None = None
) -> RewardFunction:
    """The function of a registered name or of ``path/to/file.py:function``.

    A user's file is executed once per process. Its folder is appended to ``sys.path``, so that it
    may import its neighbours.

    Raises:
        ValueError: unknown name; missing file or function; a file that fails to import; something
            that cannot be called with one `RewardRequest`.
    """
    name = RewardSpec.parse(spec).name if isinstance(spec, str) else spec.name
    path, separator, function_name = name.rpartition(":")
    if separator:
        return _function_of_file(Path(path), function_name)
    check_name(name, _REGISTRY)
    return _REGISTRY[name].make(settings or RewardSettings())


def warm_up_reward(spec: RewardSpec) -> None:
    """Run the slow imports which a registered reward would otherwise do at its first sample."""
    registered = _REGISTRY.get(spec.name)
    if registered is not None and registered.warm_up is not None:
        registered.warm_up()


def _function_of_file(path: Path, function_name: str) -> RewardFunction:
    where = f"--reward-function {path}:{function_name}"
    function = load_from_file(path, function_name, where)
    if not callable(function):
        raise ValueError(
            f"{where}: is a {type(function).__name__}, must be a function of one RewardRequest"
        )
    _check_signature(function, where)
    return cast(RewardFunction, function)


def _check_signature(function: Callable[..., object], where: str) -> None:
    if inspect.iscoroutinefunction(function):
        raise ValueError(
            f"{where}: is async; rewards are plain functions, write 'def', not 'async'"
        )
    try:
        inspect.signature(function).bind(object())
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        raise ValueError(
            f"{where}: must be callable with exactly one argument, the RewardRequest ({error})"
        ) from error
