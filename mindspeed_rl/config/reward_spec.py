"""The syntax of ``--reward-function``, and checks that are possible before a reward is loaded."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.user_files import check_python_name


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


def check_name(flag: str, name: str, known: Collection[str], *, files: bool = True) -> None:
    """Refuse a reward or environment that is neither known nor in a Python file. Executes nothing.

    Args:
        flag: Flag that names it, for messages.
        name: A known name or ``path/to/file.py:name``.
        known: Names of what is built in.
        files: Whether the user's file must be there.

    Raises:
        UsageError: The message names the flag, the nearest name and all known names.
    """
    path, separator, attribute = name.rpartition(":")
    if separator and files:
        check_python_name(Path(path), attribute, f"{flag} {name}")
    if separator or name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(
        f"{flag} {name}: unknown; {hint}known: {', '.join(sorted(known))}; "
        "for your own write path/to/file.py:name"
    )
