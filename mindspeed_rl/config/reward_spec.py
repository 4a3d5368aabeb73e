"""The syntax of ``--reward-function``, and checks that are possible before a reward is loaded."""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.core.errors import UsageError


def built_in(room: str) -> dict[str, str]:
    """The built-in rewards or environments: name -> description. Local; imports none of them.

    Each is a module of ``mindspeed_rl/ROOM/builtin``, and the first line of the module is its
    description.
    """
    folder = Path(__file__).resolve().parents[1] / room / "builtin"
    result = {}
    for path in sorted(folder.glob("[a-z]*.py")):
        with path.open(encoding="utf-8") as file:
            result[path.stem] = file.readline().strip().strip('"').rstrip(".")
    return result


BUILT_IN_REWARDS = built_in("rewards")


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A reward function and its weight in the total.

    Attributes:
        name: Name of a built-in reward, or ``path/to/file.py:function``.
        weight: Factor of the function's score in the total; finite. 0 logs the score without
            training on it.
    """

    name: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("a reward has no name; write e.g. 'math' or 'rewards.py:score=0.5'")
        if not math.isfinite(self.weight):
            raise UsageError(
                f"--reward-function {self.name}: weight {self.weight} must be a finite number"
            )

    @classmethod
    def parse(cls, text: str) -> RewardSpec:
        """Read the command line syntax ``name``, ``name=0.2`` or ``file.py:function=0.8``.

        ``name:0.2`` is the same as ``name=0.2``: a function is never called like a number.

        Raises:
            UsageError: There is no name, or the weight is not a finite number.
        """
        name, separator, weight = text.strip().rpartition("=")
        if not separator and _is_number(text.rpartition(":")[2]):
            name, separator, weight = text.strip().rpartition(":")
        if not separator:
            return cls(weight)
        try:
            return cls(name.strip(), float(weight))
        except ValueError as error:
            raise UsageError(
                f"--reward-function {text}: want 'name', 'name=WEIGHT' or "
                f"'file.py:function=WEIGHT' with a finite number as the weight, e.g. 'math=0.8' "
                f"({error})"
            ) from error

    @property
    def label(self) -> str:
        """Key of this reward in `RewardResult.parts` and metrics: the name without the file."""
        return self.name.rpartition(":")[2]

    @property
    def file(self) -> str:
        """Path of the user's file; empty for a built-in reward."""
        return self.name.rpartition(":")[0]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def check_specs(specs: Sequence[RewardSpec]) -> None:
    """Refuse an empty list of rewards, and two rewards with one label.

    Raises:
        UsageError: There is no reward, or two have one label.
    """
    if not specs:
        raise UsageError("--reward-function: none given; name at least one, e.g. 'math'")
    labels = [spec.label for spec in specs]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(
                f"--reward-function: two are called {label!r}: {[spec.name for spec in specs]}; "
                "their scores are logged by this name, rename one"
            )


def check_name(flag: str, name: str, known: Collection[str]) -> None:
    """Refuse a reward or environment without a file that is not ``known``.

    Raises:
        UsageError: The message names the flag, the nearest name and all known names.
    """
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(
        f"{flag} {name}: unknown; {hint}known: {', '.join(sorted(known))}; "
        "for your own write path/to/file.py:name"
    )


def check_python_file(path: Path, where: str) -> None:
    """Refuse a path that is no Python file; ``where`` is flag and value, for messages. Local.

    Raises:
        UsageError: The message names the absolute path.
    """
    if not path.is_file() or path.suffix != ".py":
        raise UsageError(
            f"{where}: no Python file at {str(path.absolute())!r}; "
            "give the path of a .py file that every node can read"
        )


def check_python_name(path: Path, name: str, where: str) -> None:
    """Refuse a file that is no Python, or that binds ``name`` nowhere. Local; executes nothing.

    A file that may bind the name in a way that cannot be read (``import *``, ``globals()``,
    ``exec``) passes; its import decides.

    Raises:
        UsageError: The message names the line, or the nearest names.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{where}: the file is no Python: {error}; mend it") from error
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
