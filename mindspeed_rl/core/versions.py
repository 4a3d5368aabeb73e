"""Reader of the version matrix ``versions.cfg``."""

from __future__ import annotations

import configparser
from pathlib import Path

MATRIX = Path(__file__).parents[1] / "versions.cfg"


def read_matrix(path: Path = MATRIX) -> dict[str, dict[str, str]]:
    """Read the matrix: section -> package -> version specifier, which may be empty."""
    parser = configparser.ConfigParser(allow_no_value=True, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return {name: {k: v or "" for k, v in parser[name].items()} for name in parser.sections()}


def requirements(section: str) -> list[str]:
    """The requirement lines of a section in pip's syntax."""
    return [f"{name}{specifier}" for name, specifier in read_matrix()[section].items()]


def mindspeed_branch() -> str:
    """The branch of MindSpeed that belongs to the package set for NPUs."""
    return read_matrix()["npu.system"]["mindspeed"]


def pins(platform: str) -> dict[str, str]:
    """The packages of a platform that are pinned -> their version, which may end with ``.*``."""
    matrix = read_matrix()
    rows: dict[str, str] = {}
    for section in ("core", platform, f"{platform}.no-deps"):
        rows |= matrix.get(section, {})
    return {name: spec[2:] for name, spec in rows.items() if spec.startswith("==")}
