"""A Megatron checkpoint of either format as a source."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rl.convert.classic_source import TRACKER, is_classic, iteration_folder, open_classic
from mindspeed_rl.convert.distributed_source import is_distributed, open_distributed
from mindspeed_rl.convert.source import Source
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.weights.layouts.checkpoint_files import MODEL_FILE


def open_megatron(
    directory: Path, spec: ModelSpec, *, extends_ep: bool = False, flag: str = "--load-dir"
) -> Source:
    """The newest checkpoint of a directory.

    Args:
        directory: with a tracker file, or a folder of tensors itself.
        spec: the model.
        extends_ep: see :func:`~mindspeed_rl.convert.classic_source.open_classic`.
        flag: that names the directory, for messages.

    Raises:
        UsageError: none is there, or it is not of the model.
    """
    folder = iteration_folder(directory)
    if folder is not None and is_distributed(folder):
        return open_distributed(folder, spec)
    if folder is not None and is_classic(folder):
        return open_classic(folder, spec, extends_ep=extends_ep)
    if any(directory.glob("*.safetensors")):
        raise UsageError(f"{flag} {directory} is a Hugging Face checkpoint: --load-model-type hf")
    raise UsageError(
        f"{flag} {directory}: no Megatron checkpoint; needed: {TRACKER} and the folder it names, "
        f"with mp_rank_*/{MODEL_FILE} or with metadata.json and *.distcp"
    )
