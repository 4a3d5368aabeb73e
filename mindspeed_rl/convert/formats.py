"""The checkpoint formats: their list, and recognition of the one that a directory holds."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rl.checkpoint.resume import TRACKER
from mindspeed_rl.convert import classic, hf, torch_dist
from mindspeed_rl.convert.format import Format
from mindspeed_rl.convert.source import Source
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.spec import ModelSpec

_MOST_DIGITS = 18
FORMATS: tuple[Format, ...] = (hf.FORMAT, classic.FORMAT, torch_dist.FORMAT)
"""Every format. A new one is a file with a ``FORMAT`` and an entry here."""


def target_format(model_type: str, name: str) -> Format:
    """The format of a target: that of ``model_type``, and of that ``name`` where it has several."""
    several = [format for format in FORMATS if format.model_type == model_type]
    return next((format for format in several if format.name == name), several[0])


def recognise(directory: Path, model_type: str) -> tuple[Format, Path] | None:
    """Find the newest checkpoint of a directory: its format, and the folder of its tensors.

    The folder is ``directory`` itself, or the one that its tracker file names.
    """
    folders = [directory]
    if (tracker := directory / TRACKER).is_file():
        newest = tracker.read_text(encoding="utf-8", errors="replace").strip()
        is_number = newest.isdecimal() and len(newest) <= _MOST_DIGITS
        folders.append(directory / (f"iter_{int(newest):07d}" if is_number else "release"))
    for folder in folders:
        for format in FORMATS:
            if format.model_type == model_type and format.recognises(folder):
                return format, folder
    return None


def open_checkpoint(
    directory: Path,
    model_type: str,
    spec: ModelSpec,
    *,
    extends_ep: bool = False,
    flag: str = "--load-dir",
) -> Source:
    """Open the newest checkpoint of a directory as a source.

    Args:
        directory: Directory with a tracker file, or a folder of tensors itself.
        model_type: ``"hf"`` or ``"mg"``.
        spec: Specification of the model.
        extends_ep: Whether ``--moe-tp-extend-ep`` was given, for files that do not tell.
        flag: Flag that names the directory, for messages.

    Raises:
        UsageError: There is no such checkpoint, or it is not of the model.
    """
    if found := recognise(directory, model_type):
        format, folder = found
        return format.open(folder, spec, extends_ep)
    for other in sorted({format.model_type for format in FORMATS} - {model_type}):
        if recognise(directory, other):
            raise UsageError(
                f"{flag} {directory} is no checkpoint of --load-model-type {model_type}, it is "
                f"one of --load-model-type {other}; give that"
            )
    wanted = " or ".join(format.files for format in FORMATS if format.model_type == model_type)
    raise UsageError(
        f"{flag} {directory}: no checkpoint of --load-model-type {model_type}; needed: {wanted}, "
        f"there or in the folder that {TRACKER} names"
    )
