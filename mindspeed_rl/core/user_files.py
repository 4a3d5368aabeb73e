"""The Python files of users: what they define, found out without executing them, and by import."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from mindspeed_rl.core.errors import UsageError


def _check_python_file(path: Path, where: str) -> None:
    if not path.is_file() or path.suffix != ".py":
        raise UsageError(
            f"{where}: no Python file at {str(path.absolute())!r}; "
            "give the path of a .py file that every node can read"
        )


def check_python_name(path: Path, name: str, where: str) -> None:
    """Refuse a path that is no Python file, or one that binds ``name`` nowhere; executes nothing.

    A file that may bind the name in a way that cannot be read (``import *``, ``globals()``,
    ``exec``) passes; its import decides.

    Args:
        path: Path of the file.
        name: Name of a function or class.
        where: Flag and value, for messages.

    Raises:
        UsageError: The message names the absolute path, the line, or the nearest names.
    """
    _check_python_file(path, where)
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{where}: the file is not valid Python: {error}; correct it") from error
    bound = set(_bound_names(tree))
    if name in bound or bound & _BINDS_ANYTHING:
        return
    near = ", ".join(difflib.get_close_matches(name, sorted(bound), n=3, cutoff=0.5))
    raise UsageError(
        f"{where}: the file defines no {name!r}; "
        + (f"nearest: {near}" if near else "define it at the top level, or name what is there")
    )


_BINDS_ANYTHING = {"*", "globals", "locals", "vars", "setattr", "exec", "eval"}
_BINDS_ANYTHING |= {"__dict__", "__getattr__"}


def _bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield every name that is bound, or that could bind others, anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name) and (
            isinstance(node.ctx, ast.Store) or node.id in _BINDS_ANYTHING
        ):
            yield node.id
        elif isinstance(node, ast.Attribute) and node.attr in _BINDS_ANYTHING:
            yield node.attr


def load_from_file(path: Path, name: str, where: str) -> Callable[..., object]:
    """Return the function or class that the file ``path`` calls ``name``.

    The file is executed once per process. Its folder is appended to ``sys.path``, so that it may
    import its neighbours.

    Args:
        path: Path of the file.
        name: Name of a function or class.
        where: Flag and value, for messages.

    Raises:
        UsageError: no such file or name, something that cannot be called, or the file fails to
            import.
    """
    _check_python_file(path, where)
    module = _load(path.resolve(), where)
    value: object = getattr(module, name, None)
    if value is None:
        found = [key for key, own in vars(module).items() if _is_own(own, module)]
        raise UsageError(
            f"{where}: the file defines no {name!r}; its functions: {', '.join(found) or 'none'}"
        )
    if not callable(value):
        raise UsageError(f"{where}: is a {type(value).__name__}, must be a function or class")
    return value


def _is_own(value: object, module: ModuleType) -> bool:
    made_here = inspect.isfunction(value) or inspect.isclass(value)
    return made_here and getattr(value, "__module__", None) == module.__name__


def _load(path: Path, where: str) -> ModuleType:
    module_name = f"user_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
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
