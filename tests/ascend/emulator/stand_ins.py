"""Modules that come with CANN or a device and are imported, but not used, by what runs here.

A stand-in has any attribute that is asked for; using one as anything but a class, a decorator or a
module fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

# Packages that vLLM imports and nothing here uses, besides those of CANN and Triton.
VLLM_NEEDS = ("torchvision", "gguf", "cv2", "torchaudio", "ijson", "numba", "mistral_common",
              "uvicorn")  # fmt: skip


class _Anything(type):
    """A class whose attributes are classes of the same kind."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _made(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """As a decorator: what it decorates stays as it is."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function


def _made(name: str) -> Any:
    return _Anything(name, (), {})


class _StandIn(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _made(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""
        if module.__name__ == "triton.backends":
            module.backends = {}  # type: ignore[attr-defined]


def install(*names: str) -> None:
    """Stand in for packages that are not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(missing))
