"""A registry of monkeypatches that check their target before they touch it.

Every patch says why it exists, where upstream stands, for which versions it was checked and when it
can be removed. A target that is gone or whose signature changed is refused, not patched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

_APPLIED: set[str] = set()


@dataclass(frozen=True, slots=True)
class Patch:
    """The replacement of one attribute of another package.

    Attributes:
        target: ``"package.module:Class.method"`` or ``"package.module:function"``. A method that
            the class inherits is replaced for that class alone.
        parameters: Parameter names of the target that the replacement was written for.
        make: Function that turns the original into the replacement.
        why: Reason for the patch, in one or two sentences.
        upstream: Thread or file of the upstream project where the cause lies.
        versions: Versions for which the patch was checked.
        remove_when: Condition under which the patch can be removed.
    """

    target: str
    parameters: tuple[str, ...]
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    why: str
    upstream: str
    versions: str
    remove_when: str


def apply_patch(patch: Patch) -> None:
    """Apply a patch once; a second call does nothing.

    Raises:
        RuntimeError: The target is missing or has other parameters than the patch was written for.
    """
    if patch.target in _APPLIED:
        return
    module, _, path = patch.target.partition(":")
    parent, _, name = path.rpartition(".")
    try:
        owner: Any = resolve_name(f"{module}:{parent}")
        # Not `getattr`: it hides that a method is static and must be replaced by such a one.
        raw = inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"patch {patch.target}: the target does not exist in the installed version ({error}); "
            f"checked versions: {patch.versions}. Install a version of the matrix "
            "(mindspeed_rl/versions.cfg) or update the patch"
        ) from error
    is_static = isinstance(raw, staticmethod)
    function = raw.__func__ if is_static else raw
    found = tuple(inspect.signature(function).parameters)
    if found != patch.parameters:
        raise RuntimeError(
            f"patch {patch.target}: its parameters are {found}, the patch was written for "
            f"{patch.parameters}; checked versions: {patch.versions}"
        )
    replacement = patch.make(function)
    setattr(owner, name, staticmethod(replacement) if is_static else replacement)
    _APPLIED.add(patch.target)
