"""Loads a name from a user's Python file: ``path/to/file.py:name`` on the command line."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from mindspeed_rl.config.reward_spec import check_python_file
from mindspeed_rl.core.errors import UsageError


def load_from_file(path: Path, name: str, where: str) -> object:
    """Return what the file ``path`` calls ``name``.

    The file is executed once per process. Its folder is appended to ``sys.path``, so that it may
    import its neighbours.

    Args:
        path: Path of the file.
        name: Name of a function or class.
        where: Flag and value, for messages.

    Raises:
        UsageError: no such file or name, or the file fails to import.
    """
    check_python_file(path, where)
    module = _load(path.resolve(), where)
    value = getattr(module, name, None)
    if value is None:
        found = [key for key, own in vars(module).items() if _is_own(own, module)]
        raise UsageError(
            f"{where}: the file defines no {name!r}; its functions: {', '.join(found) or 'none'}"
        )
    return value


def _is_own(value: object, module: ModuleType) -> bool:
    made_here = inspect.isfunction(value) or inspect.isclass(value)
    return made_here and getattr(value, "__module__", None) == module.__name__


def _load(path: Path, where: str) -> ModuleType:
    module_name = f"user_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None and module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Registered before it runs: dataclasses and pickle look their module up by name.
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise UsageError(
            f"{where}: the file fails to import: {type(error).__name__}: {error}"
        ) from error
    return module
