"""Writes ``config.json``: with which values, versions and command a run was started, and where."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rl.config.outputs import CONFIG_FILE
from mindspeed_rl.core import versions
from mindspeed_rl.core.files import write_text_atomic
from mindspeed_rl.core.flag import flag_names
from mindspeed_rl.core.redaction import redacted, redacted_command
from mindspeed_rl.core.shipped import noted_commit
from mindspeed_rl.metrics.jsonl import encode_json

if TYPE_CHECKING:
    from mindspeed_rl.launch.job import Job

_ROOT = Path(__file__).resolve().parents[2]
# Sections of the version matrix whose names are no packages, or none that a run uses.
_OF_NO_RUN = ("python", "cuda.system", "npu.system", "dev")


def local_time() -> str:
    """Return the time of now with its zone, for a reader."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def write_run_record(job: Job[Any, Any], start: int) -> None:
    """Write the record of this start into ``--output-dir``. Local: one rank of the job calls it.

    The record of the start before a resume is kept under a name that says up to which step it held.

    Args:
        job: Job of the run.
        start: Number of steps that are done.

    Raises:
        OSError: The folder cannot be written.
    """
    target = Path(job.config.logging.output_dir) / CONFIG_FILE
    if start and target.exists():
        target.replace(target.with_stem(f"{target.stem}-until-step-{start}"))
    record = {
        "command_line": redacted_command(job.command_line),
        "after_step": start,
        "started": local_time(),
        "commit": package_commit(),
        "versions": installed_versions(),
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "platform": job.platform.name,
            "ranks": job.world.size,
            "ranks_per_node": job.world.local_size,
        },
        "flags": flag_values(job.config),
    }
    write_text_atomic(target, encode_json(record, indent=2) + "\n")


def flag_values(config: Any) -> dict[str, Any]:
    """Return the values in effect of all flags of a configuration, by flag; secrets are hidden."""
    found: dict[str, Any] = {}
    for section in (getattr(config, field.name) for field in fields(config)):
        if not is_dataclass(section):  # the options that are handed to the engine
            found |= {f"--vllm-{name.replace('_', '-')}": value for name, value in section.items()}
            continue
        for field in fields(section):
            if "flag" in field.metadata:
                value = getattr(section, field.name)
                found[flag_names(field)[0]] = not value if field.default is True else value
    return redacted(dict(sorted(found.items())))  # type: ignore[no-any-return]


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, of this package, and of what it is built on, if installed."""
    sections = (rows for name, rows in versions.read_matrix().items() if name not in _OF_NO_RUN)
    found = {"python": platform.python_version()}
    for name in ("mindspeed-rl-megatron", *chain.from_iterable(sections)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def package_commit() -> str | None:
    """Return the commit of this package: what its wheel noted, or that of its checkout."""
    noted = noted_commit()
    return source_commit(_ROOT) if noted is None else noted or None


def source_commit(folder: Path) -> str | None:
    """Return the commit of a checkout, with ``-dirty`` where files differ; ``None`` without one."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git, or a slow file system
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def as_markdown(values: Mapping[str, Any]) -> str:
    """Return flags and their values as a table in Markdown."""
    rows = (f"| `{name}` | `{value}` |" for name, value in values.items())
    return "\n".join(["| flag | value |", "|---|---|", *rows])
