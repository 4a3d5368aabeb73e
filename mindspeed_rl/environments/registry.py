"""Resolves an environment's name on the command line to its factory."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

from mindspeed_rl.config.environment import BUILT_IN_ENVIRONMENTS
from mindspeed_rl.config.reward_spec import check_name
from mindspeed_rl.core.user_files import load_from_file
from mindspeed_rl.environments.types import EnvironmentFactory


def resolve_environment(name: str) -> EnvironmentFactory:
    """Return the factory of a built-in environment or of ``path/to/file.py:Name``.

    Raises:
        UsageError: unknown name; missing file or name; something that cannot be called.
    """
    path, separator, attribute = name.rpartition(":")
    if not separator:
        check_name("--rl-environment", name, BUILT_IN_ENVIRONMENTS)
        module = importlib.import_module(f"mindspeed_rl.environments.builtin.{name}")
        return cast(EnvironmentFactory, module.make)
    factory = load_from_file(Path(path), attribute, f"--rl-environment {name}")
    return cast(EnvironmentFactory, factory)
