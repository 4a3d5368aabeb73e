"""Reader of ``synonyms.toml``: what flags of other RL stacks are called here."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path


@cache
def synonyms() -> Mapping[str, str]:
    """Return the answer to each flag of another stack, a clause that follows its name."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["synonyms"]
    return {f"--{name}": answer for answer, names in rows for name in names.split()}


def answer_to_override(path: str, answers: Mapping[str, str], own: Collection[str]) -> str:
    """Return what verl's override of a path like ``actor_rollout_ref.rollout.n`` is called here.

    The longest end of the path that has an answer decides, and last a flag of the same name: not
    for the rollout or the critic, where other flags have that name.

    Args:
        path: What is left of the equals sign.
        answers: Result of :func:`synonyms`.
        own: Spellings of all flags of the entry.

    Returns:
        A clause with a semicolon before it, or nothing.
    """
    words = path.lstrip("+").replace("_", "-").split(".")
    for start in range(len(words)):
        name = "--" + ".".join(words[start:])
        if name in answers:
            return f"; {name.removeprefix('--') if '.' in name else name} {answers[name]}"
    name = f"--{words[-1]}"
    same = name in own and not {"rollout", "critic"} & {*words[:-1]}
    return f"; {name} is a flag here" if same else ""
