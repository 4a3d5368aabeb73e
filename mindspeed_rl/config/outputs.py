"""The paths that a run reads and writes, checked before anything heavy starts.

Nothing that a run did not make itself is ever replaced or removed: an exported model carries a
record, results have known names, and both are only overwritten when the user asks for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_rl.config import CheckpointConfig, LoggingConfig, PretrainRunConfig, RLRunConfig
from mindspeed_rl.core.errors import UsageError, check_each
from mindspeed_rl.core.export_names import ADAPTER_FILES, adapter_folder, interval_exports
from mindspeed_rl.models.hf_code import code_files

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.json"
ROLLOUTS_FILE = "rollouts.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
PAGE_FILE = "rollouts.html"
SUMMARY_FILE = "summary.json"
CURVES_FILE = "curves.png"
TENSORBOARD_FOLDER = "tensorboard"
EVENT_FILES = "events.out.tfevents.*"
EXPORT_FOLDER = "hf"

# The file that marks a folder as an export, with the step and the names of the other files.
EXPORT_RECORD = "export.json"
EXPORT_FORMAT = "mindspeed_rl.hf_export"
EXPORT_VERSION = 1


def export_target(config: RLRunConfig | PretrainRunConfig) -> str:
    """The directory of the exported model; a supervised run exports only where it is asked to."""
    if config.checkpoint.export_hf or isinstance(config, PretrainRunConfig):
        return config.checkpoint.export_hf
    return str(Path(config.logging.output_dir) / EXPORT_FOLDER)


def export_record(step: int, files: list[str]) -> dict[str, Any]:
    """The content of :data:`EXPORT_RECORD`."""
    return {
        "format": EXPORT_FORMAT,
        "version": EXPORT_VERSION,
        "step": step,
        "files": sorted(files),
    }


def refuse_foreign_target(target: Path, flag: str = "--export-hf") -> None:
    """Refuse a target of ``flag`` that is anything but an earlier export.

    Raises:
        UsageError: ``target`` exists and is not an export of this project, or holds other files.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    files = exported_files(target)
    if files is None:
        raise UsageError(
            f"{flag} {target} exists and was not exported by mindspeed_rl (it has no "
            f"{EXPORT_RECORD}), so it is not replaced; choose another directory, or remove it"
        )
    others = sorted(path.name for path in target.iterdir() if path.name not in files)
    if others:
        raise UsageError(
            f"{flag} {target} holds more than the export it was: {', '.join(others[:5])}; "
            "move these files elsewhere, or choose another directory"
        )


def refuse_foreign_adapters(folder: Path) -> None:
    """Refuse a folder of adapters, next to the export, that holds anything but such files.

    Raises:
        UsageError: It does.
    """
    found = folder.iterdir() if folder.is_dir() else ()
    others = sorted(path.name for path in found if path.name not in ADAPTER_FILES)
    if others:
        raise UsageError(
            f"--export-hf: {folder}, where the adapters are written, holds other files: "
            f"{', '.join(others[:5])}; move them elsewhere, or choose another directory"
        )


def exported_files(target: Path) -> set[str] | None:
    """Return the names of an export's files, its record included; ``None``: it is no export."""
    try:
        record = json.loads((target / EXPORT_RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # not there, or not JSON
        return None
    if not isinstance(record, dict) or record.get("format") != EXPORT_FORMAT:
        return None
    files = record.get("files")
    return {*map(str, files), EXPORT_RECORD} if isinstance(files, list | dict) else None


def earlier_results(output_dir: str) -> list[Path]:
    """The results of an earlier run in ``--output-dir``: its files and its export."""
    root = Path(output_dir)
    names = (
        *(METRICS_FILE, ROLLOUTS_FILE, EVALUATIONS_FILE, SUMMARY_FILE, CURVES_FILE, PAGE_FILE),
    )
    found = [root / name for name in names if (root / name).is_file()]
    found += sorted((root / TENSORBOARD_FOLDER).glob(EVENT_FILES))
    exports = (root / EXPORT_FOLDER, *interval_exports(root / EXPORT_FOLDER).values())
    return found + [path for path in exports if exported_files(path) is not None]


def refuse_earlier_results(logging: LoggingConfig, load: str = "") -> None:
    """Refuse to start at step 0 in a folder that holds the results of another run.

    Raises:
        UsageError: ``--output-dir`` holds results and ``--overwrite-output-dir`` is not given.
    """
    if logging.overwrite_output_dir:
        return
    folder = logging.tensorboard_dir
    if folder and (events := sorted(Path(folder).glob(EVENT_FILES))):
        raise UsageError(
            f"--tensorboard-dir {folder} holds the events of another run "
            f"({events[0].name}): choose another folder, or add --overwrite-output-dir to hide "
            "them (they are not removed)"
        )
    found = earlier_results(logging.output_dir)
    if not found:
        return
    names = list(dict.fromkeys(p.relative_to(logging.output_dir).parts[0] for p in found))
    resume = (
        f"--load {load} has no checkpoint to go on from"
        if load
        else "add --load DIR to go on with that run"
    )
    raise UsageError(
        f"--output-dir {logging.output_dir} holds the results of an earlier run "
        f"({', '.join(names)}): choose another --output-dir, or add --overwrite-output-dir to "
        f"replace them; {resume}"
    )


def check_paths(config: RLRunConfig | PretrainRunConfig) -> None:
    """Check the paths that a run loads from and writes to. Local; changes nothing.

    Raises:
        UsageError: The message names the flag, the path and the fix.
    """
    checkpoint, logging = config.checkpoint, config.logging
    target = export_target(config)
    folders = (
        ("--output-dir", logging.output_dir),
        ("--tensorboard-dir", logging.tensorboard_dir),
        ("--save", checkpoint.save),
        ("--export-hf", str(Path(target).parent) if target else ""),
    )
    checks: list[Callable[[], object]] = [partial(_check_load, checkpoint)]
    checks += [partial(_check_writable, flag, Path(path)) for flag, path in folders if path]
    checks += [partial(_check_exports, config, target), partial(_check_critic, config, target)]
    # Of several nodes one may have been started again, and joins a restart that it learns of later.
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        checks.append(partial(refuse_results_of_others, config))
    check_each(*checks)


def refuse_results_of_others(config: RLRunConfig | PretrainRunConfig) -> None:
    """Refuse to start from the beginning in a folder that holds the results of another run.

    Raises:
        UsageError: As of :func:`refuse_earlier_results`.
    """
    if not config.checkpoint.load or config.checkpoint.finetune:
        refuse_earlier_results(config.logging)


def _check_load(checkpoint: CheckpointConfig) -> None:
    own = checkpoint.save and Path(checkpoint.load).resolve() == Path(checkpoint.save).resolve()
    # A run may name its own folder before its first checkpoint: it then starts from the beginning.
    if checkpoint.load and not own and not Path(checkpoint.load).is_dir():
        raise UsageError(
            f"--load {checkpoint.load}: no such directory; name the --save folder of a run, or "
            "leave --load out to start from --hf-checkpoint"
        )


def _check_exports(config: RLRunConfig | PretrainRunConfig, target: str) -> None:
    """Check the places of exported models, and that their code can be copied."""
    if target:
        _check_export_target("--export-hf", Path(target), config)
        if isinstance(config, RLRunConfig) and config.lora.is_on:
            refuse_foreign_adapters(adapter_folder(target))
        if config.checkpoint.export_hf_interval:
            for export in interval_exports(target).values():
                refuse_foreign_target(export, "--export-hf-interval")
        code_files(Path(config.model.hf_checkpoint), Path(config.model.tokenizer_directory))


def _check_critic(config: RLRunConfig | PretrainRunConfig, target: str) -> None:
    """Check the place of the exported critic."""
    if isinstance(config, RLRunConfig) and config.critic.critic_export_hf:
        critic = Path(config.critic.critic_export_hf)
        _check_writable("--critic-export-hf", critic.parent)
        _check_export_target("--critic-export-hf", critic, config)
        source = config.critic.critic_hf_checkpoint or config.model.hf_checkpoint
        code_files(Path(source), Path(config.model.tokenizer_directory))
        if critic.resolve() == Path(target).resolve():
            raise UsageError(
                f"--critic-export-hf {critic} is where the policy is exported; choose another "
                "directory"
            )


def check_output_file(flag: str, path: str) -> None:
    """Check that a file can be written at the end of a run. Local; changes nothing.

    Raises:
        UsageError: The path is a directory, or its folder cannot be made or written to.
    """
    if Path(path).is_dir():
        raise UsageError(f"{flag} {path}: is a directory; name a file in it")
    _check_writable(flag, Path(path).parent)


def _check_writable(flag: str, path: Path) -> None:
    place = path.absolute()
    existing = next(p for p in (place, *place.parents) if p.exists())
    if not existing.is_dir():
        raise UsageError(f"{flag} {path}: {existing} is not a directory; choose another place")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(
            f"{flag} {path}: no permission to write in {existing}; choose another place, or "
            "change its permissions"
        )


def _check_export_target(name: str, target: Path, config: RLRunConfig | PretrainRunConfig) -> None:
    place = target.resolve()
    for flag, path in (
        ("--hf-checkpoint", config.model.hf_checkpoint),
        ("--tokenizer-name-or-path", config.model.tokenizer_name_or_path),
        ("--load", config.checkpoint.load),
        ("--save", config.checkpoint.save),
        ("--output-dir", config.logging.output_dir),
    ):
        if path and (kept := Path(path).resolve()) and place in (kept, *kept.parents):
            where = "is" if place == kept else "contains"
            raise UsageError(
                f"{name} {target} {where} {flag} {path}, which the export would replace; "
                "choose a directory of its own"
            )
    refuse_foreign_target(target, name)
