"""Megatron checkpoints as sources, with recognition of the format: classic or distributed."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rl.checkpoint.resume import TRACKER
from mindspeed_rl.convert.classic import open_classic
from mindspeed_rl.convert.source import Source
from mindspeed_rl.convert.torch_dist import FORMAT, INDEX, open_distributed
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.weights.layouts.checkpoint_files import MODEL_FILE


def checkpoint_folder(directory: Path) -> Path | None:
    """Return the folder with the tensors of the newest checkpoint, which the tracker file names.

    It is ``directory`` itself when that is such a folder, and ``None`` when there is neither.
    """
    folders = [directory]
    if (tracker := directory / TRACKER).is_file():
        newest = tracker.read_text(encoding="utf-8").strip()
        folders.append(directory / (f"iter_{int(newest):07d}" if newest.isdecimal() else "release"))
    return next((f for f in folders if _is_distributed(f) or _is_classic(f)), None)


def _is_distributed(folder: Path) -> bool:
    return (folder / FORMAT).is_file() and (folder / INDEX).is_file()


def _is_classic(folder: Path) -> bool:
    return any(folder.glob(f"mp_rank_*/{MODEL_FILE}"))


def open_megatron(
    directory: Path, spec: ModelSpec, *, extends_ep: bool = False, flag: str = "--load-dir"
) -> Source:
    """Open the newest checkpoint of a directory as a source.

    Args:
        directory: Directory with a tracker file, or a folder of tensors itself.
        spec: Specification of the model.
        extends_ep: See :func:`~mindspeed_rl.convert.classic.open_classic`.
        flag: Flag that names the directory, for messages.

    Raises:
        UsageError: There is no checkpoint, or it is not of the model.
    """
    folder = checkpoint_folder(directory)
    if folder is not None:
        if _is_distributed(folder):
            return open_distributed(folder, spec)
        return open_classic(folder, spec, extends_ep=extends_ep)
    if any(directory.glob("*.safetensors")):
        raise UsageError(f"{flag} {directory} is a Hugging Face checkpoint: --load-model-type hf")
    raise UsageError(
        f"{flag} {directory}: no Megatron checkpoint; needed: {TRACKER} and the folder it names, "
        f"with mp_rank_*/{MODEL_FILE} or with metadata.json and *.distcp"
    )
