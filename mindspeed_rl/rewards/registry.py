"""Turns names on the command line into functions: built-in rewards, and ``FILE.py:NAME``."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import cast

from mindspeed_rl.config.reward_spec import BUILT_IN_REWARDS, RewardSpec, check_name
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.user_files import load_from_file
from mindspeed_rl.rewards.types import BuiltInReward, RewardFunction, RewardSettings


def resolve_reward(
    spec: RewardSpec | str, settings: RewardSettings | None = None
) -> RewardFunction:
    """Return the function of a built-in reward or of ``path/to/file.py:function``.

    A user's file is executed once per process. Its folder is appended to ``sys.path``, so that it
    may import its neighbours.

    Raises:
        UsageError: unknown name; missing file or function; a file that fails to import; something
            that cannot be called with one `RewardRequest`.
    """
    name = RewardSpec.parse(spec).name if isinstance(spec, str) else spec.name
    path, separator, function_name = name.rpartition(":")
    if separator:
        return _function_of_file(Path(path), function_name)
    return built_in_reward(name).make(settings or RewardSettings())


def warm_up_reward(spec: RewardSpec) -> None:
    """Run the slow imports which a built-in reward would otherwise do at its first sample."""
    warm_up = None if spec.file else built_in_reward(spec.name).warm_up
    if warm_up is not None:
        warm_up()


def built_in_reward(name: str) -> BuiltInReward:
    """Return the declaration of a built-in reward.

    Raises:
        UsageError: there is no built-in reward of this name.
    """
    check_name("--reward-function", name, BUILT_IN_REWARDS)
    module = importlib.import_module(f"mindspeed_rl.rewards.builtin.{name}")
    return cast(BuiltInReward, module.REWARD)


@cache
def verdicts() -> tuple[str, ...]:
    """Return the built-in rewards whose full marks mean a right response, the best one first."""
    ranks = {name: built_in_reward(name).verdict for name in BUILT_IN_REWARDS}
    return tuple(sorted(filter(ranks.get, ranks), key=ranks.__getitem__))


def _function_of_file(path: Path, function_name: str) -> RewardFunction:
    where = f"--reward-function {path}:{function_name}"
    function = load_from_file(path, function_name, where)
    if inspect.iscoroutinefunction(function):
        raise UsageError(
            f"{where}: is async; rewards are plain functions, write 'def', not 'async'"
        )
    try:
        inspect.signature(function).bind(object())
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        raise UsageError(
            f"{where}: must be callable with exactly one argument, the RewardRequest ({error})"
        ) from error
    return cast(RewardFunction, function)
