"""Reader of the version matrix ``versions.cfg``."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
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


def sets_of(platform: str) -> tuple[str, ...]:
    """The sections of the package sets for a platform, the usual one first."""
    return ("cuda", "cuda-torch211") if platform == "cuda" else (platform,)


def section_for(
    platform: str,
    torch: str,
    matrix: Mapping[str, Mapping[str, str]] | None = None,
    *,
    engine: bool = True,
) -> str:
    """The section of the package set that an installed torch belongs to, else the usual one.

    Args:
        platform: ``cpu``, ``cuda`` or ``npu``.
        torch: Installed version; empty if there is none. Further sets pin it as ``==2.11.*``.
        matrix: Result of :func:`read_matrix`.
        engine: Whether there is an inference engine; without one the set of a platform's trainer
            is taken, if it has one.
    """
    first, *others = sets_of(platform)
    rows = matrix or read_matrix()
    if not engine and (trainer := f"{platform}-trainer") in rows:
        return trainer
    for name in others:
        # No library compares them: a bare machine, which installs by this file, has none.
        if torch.startswith(rows[name]["torch"].removeprefix("==").removesuffix("*")):
            return name
    return first


def engine_versions(platform: str, package: str) -> list[str]:
    """The pinned versions of an engine's package, one for each package set of a platform."""
    matrix = read_matrix()
    sections = [*sets_of(platform), f"{platform}.no-deps"]
    found = [matrix[name][package] for name in sections if package in matrix.get(name, {})]
    return [specifier.removeprefix("==") for specifier in found]


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
