"""Reader of ``synonyms.toml``: what flags of other RL stacks are called here."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def synonyms() -> Mapping[str, str]:
    """Return the answer to each flag of another stack, a clause that follows its name."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["synonyms"]
    return {f"--{name}": answer for answer, names in rows for name in names.split()}
