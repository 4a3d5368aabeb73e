"""The table and the files of a check, without what identifies its user."""

from __future__ import annotations

import getpass
import json
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from device_check.results import Result, StageStatus
from mindspeed_rl.core.files import write_text_atomic
from mindspeed_rl.core.redaction import redacted_text
from mindspeed_rl.metrics.run_record import installed_versions, package_commit

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 40
_UNITS = (("_gb_per_s", "GB/s"), ("_per_s", "/s"), ("_s", "s"), ("_mib", "MiB"))


def tidy(text: str, folder: Path) -> str:
    """Return a text without folders of the user, the name of the machine, and secrets of URLs."""
    names: list[tuple[str, str]] = [
        (str(folder.resolve()), "<check>"),
        (str(ROOT), "<repository>"),
        (str(Path.home()), "~"),
    ]
    for place, shown in names:
        if len(place) > 1:
            text = text.replace(place, shown)
    for word, shown in ((socket.gethostname(), "<host>"), (_user(), "<user>")):
        if len(word) > 2:
            text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", shown, text)
    return redacted_text(text)


def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no entry
        return ""
    return "" if name == "root" else name  # a word of messages, which identifies nobody


def machine_facts(kind: str, device: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reader of the report must know of the machine."""
    return {
        "platform": kind,
        "device": dict(device),
        "system": platform.platform(),
        "versions": installed_versions(),
        "commit": package_commit() or "",
    }


def shown_figures(result: Result) -> str:
    """Return the numbers of a stage in one line."""
    return ", ".join(f"{_words(name)} {_number(name, v)}" for name, v in result.figures.items())


def _words(name: str) -> str:
    stem = next((name.removesuffix(end) for end, _ in _UNITS if name.endswith(end)), name)
    return stem.replace("_", " ")


def _number(name: str, value: float) -> str:
    unit = next((unit for end, unit in _UNITS if name.endswith(end)), "")
    text = f"{value:.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"
    return f"{text}{'' if unit.startswith('/') else ' ' if unit else ''}{unit}"


def table(results: Sequence[Result]) -> list[str]:
    """Return the lines of the table: a line a stage, and under it why it failed or was skipped."""
    width = max(len(result.stage) for result in results)
    lines = []
    for result in results:
        seconds = f"{result.seconds:.1f} s" if result.seconds else "-"
        begin = f"{result.stage.ljust(width)}  {result.status.value.ljust(7)}  {seconds.rjust(7)}"
        lines.append(f"{begin}  {shown_figures(result)}".rstrip())
        if result.note:
            lines.append(f"{' ' * width}  {result.note}")
    return lines


def verdict(results: Sequence[Result]) -> str:
    """Return the last line of the report."""
    count = {status: sum(r.status is status for r in results) for status in StageStatus}
    return (
        f"{count[StageStatus.OK]} of {len(results)} stages ok, {count[StageStatus.FAILED]} failed, "
        f"{count[StageStatus.SKIPPED]} skipped"
    )


def write_report(
    folder: Path,
    results: Sequence[Result],
    facts: Mapping[str, Any],
    tails: Mapping[str, str],
) -> tuple[Path, Path]:
    """Write ``device_check.json`` and ``device_check.txt`` into the folder of the check.

    Args:
        folder: Folder of the check.
        results: All stages, in order.
        facts: Result of :func:`machine_facts`.
        tails: The end of what a failed process printed, by its name.
    """
    record = {
        **facts,
        "stages": [result.as_json() for result in results],
        "printed": dict(tails),
    }
    text = tidy(json.dumps(record, indent=1), folder)
    as_json, as_text = folder / "device_check.json", folder / "device_check.txt"
    write_text_atomic(as_json, text + "\n")
    parts = [
        f"{facts['platform']}: {facts['device'] or 'no device was opened'}",
        f"{facts['system']}, commit {facts['commit']}",
        ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        "",
        *table(results),
        verdict(results),
    ]
    parts += [f"\n== printed by {name}\n{tail}" for name, tail in tails.items()]
    write_text_atomic(as_text, tidy("\n".join(parts), folder) + "\n")
    return as_json, as_text


def tail_of(log: Path) -> str:
    """Return the last lines of a log; empty without one."""
    if not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])
