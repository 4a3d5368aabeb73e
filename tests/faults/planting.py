"""Plants a named fault at run time, right after the module of its target was executed.

Nothing of the source is matched: a fault names what it replaces by module and qualified name.
``from x import f`` binds early, so an import hook replaces ``f`` before any other module can see
it. The fault is chosen by environment variables, so spawned ranks and torchrun processes have it as
well (``bootstrap/sitecustomize.py``). What happens to it is appended to a report file:

- ``planted``: the target exists and was replaced,
- ``reached``: the replacement was called,
- ``broken``: the target does not exist, or the fault itself raised; its row must be mended.

No torch here: this is imported at the start of every process.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FAULT = "MINDSPEED_RL_FAULT"
REPORT = "MINDSPEED_RL_FAULT_REPORT"
#: module with ``FAULTS``, where it is not :mod:`faults.table`
TABLE = "MINDSPEED_RL_FAULT_TABLE"
_FOLDER = str(Path(__file__).resolve().parent)

Change = Callable[[Callable[..., Any]], Callable[..., Any]]


class FaultError(Exception):
    """A row of the table that cannot be planted; the message names it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to be silently wrong.

    Attributes:
        name: words with dashes.
        target: ``package.module:Class.method`` or ``package.module:function``; a name that the
            module only imports is replaced in that module alone.
        change: the original function -> what is called in its place.
        test: node id of a test of the first tier that must fail.
        danger: why it matters, one sentence.
    """

    name: str
    target: str
    change: Change
    test: str
    danger: str

    @property
    def module(self) -> str:
        """The module that is changed."""
        return self.target.partition(":")[0]


# --- changes -----------------------------------------------------------------------------------


def returns(value: Any) -> Change:
    """The call is skipped and gives ``value``."""
    return lambda original: lambda *args, **kwargs: value


skipped = returns(None)


def gives(edit: Callable[[Any], Any]) -> Change:
    """Another result."""
    return lambda original: lambda *args, **kwargs: edit(original(*args, **kwargs))


def gives_fields(**edits: Callable[[Any], Any]) -> Change:
    """A result, a dataclass, with fields made of the whole result."""
    return gives(lambda r: replace(r, **{name: edit(r) for name, edit in edits.items()}))


def takes(**edits: Callable[[Any], Any]) -> Change:
    """Other arguments, by name; each is made of what was given or is the default."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def changed(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for name, edit in edits.items():
                bound.arguments[name] = edit(bound.arguments[name])
            return original(*bound.args, **bound.kwargs)

        return changed

    return change


def then(effect: Callable[..., object]) -> Change:
    """The call, and afterwards ``effect`` of the same arguments."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            effect(*args, **kwargs)
            return result

        return changed

    return change


def without(name: str) -> Change:
    """A method during whose calls another method of the object does nothing."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
            getattr(self, name)  # loud when there is none
            setattr(self, name, lambda *_, **__: None)
            try:
                return original(self, *args, **kwargs)
            finally:
                delattr(self, name)

        return changed

    return change


def keeps(path: str) -> Change:
    """A call after which an attribute below its first argument is what it was before."""
    *owners, last = path.split(".")

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(first: Any, *args: Any, **kwargs: Any) -> Any:
            owner = functools.reduce(getattr, owners, first)
            before = getattr(owner, last)
            result = original(first, *args, **kwargs)
            setattr(owner, last, before)
            return result

        return changed

    return change


# --- planting ----------------------------------------------------------------------------------


def plant(fault: Fault, module: ModuleType, report: Callable[[str], None]) -> None:
    """Replace the target in a module that has just been executed.

    Raises:
        FaultError: there is no such target.
    """
    owner: Any = module
    *owners, last = fault.target.partition(":")[2].split(".")
    try:
        for name in owners:
            owner = getattr(owner, name)
        setattr(owner, last, _planted(fault, inspect.getattr_static(owner, last), report))
    except AttributeError as error:
        report(f"broken: {fault.target} does not exist")
        raise FaultError(f"fault {fault.name!r}: {fault.target} does not exist") from error
    report("planted")


def _planted(fault: Fault, original: Any, report: Callable[[str], None]) -> Any:
    """The replacement, of the same kind, that tells when it is called."""
    if isinstance(original, (staticmethod, classmethod)):
        return type(original)(_planted(fault, original.__func__, report))
    if not callable(original):
        report(f"broken: {fault.target} is no function")
        raise FaultError(f"fault {fault.name!r}: {fault.target} is no function")
    replacement, seen = fault.change(original), False

    @functools.wraps(original)
    def planted(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if not seen:
            seen = True
            report("reached")
        try:
            return replacement(*args, **kwargs)
        except Exception as error:
            if _raised_by(fault, error):
                report(f"broken: the fault itself raised {error!r}")
            raise

    return planted


def _raised_by(fault: Fault, error: BaseException) -> bool:
    """Whether code of a fault, and not of the product, raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).name not in ("dataclasses.py", "inspect.py")]
    table = inspect.getfile(fault.change)
    return bool(own) and (own[-1].filename == table or own[-1].filename.startswith(_FOLDER))


class _PlantingFinder(MetaPathFinder):
    """Finds one module as Python does, and changes it when it has been executed."""

    def __init__(self, fault: Fault, report: Callable[[str], None]) -> None:
        self._fault, self._report = fault, report

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._fault.module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute: Callable[[ModuleType], None] = spec.loader.exec_module

        def exec_and_plant(module: ModuleType) -> None:
            execute(module)
            plant(self._fault, module, self._report)

        spec.loader.exec_module = exec_and_plant  # type: ignore[method-assign]
        return spec


def plant_when_imported(fault: Fault, report: Callable[[str], None]) -> None:
    """Plant a fault in this process, now or when its module is imported."""
    if fault.module in sys.modules:
        plant(fault, sys.modules[fault.module], report)
    else:
        sys.meta_path.insert(0, _PlantingFinder(fault, report))


def plant_from_environment() -> None:
    """Plant the fault that the environment names, if it names one."""
    name, file = os.environ.get(FAULT), os.environ.get(REPORT, os.devnull)
    if not name:
        return
    table = __import__(os.environ.get(TABLE, "faults.table"), fromlist=["FAULTS"])

    def report(line: str) -> None:
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    known = {fault.name: fault for fault in table.FAULTS}
    if name not in known:
        report(f"broken: no fault is called {name}")
        raise FaultError(f"{FAULT}={name}: no such fault")
    plant_when_imported(known[name], report)
