"""Reading of Hugging Face checkpoints: each rank reads only the slices that it needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mindspeed_rl.checkpoint.finite import LARGEST_WEIGHT, problem_of
from mindspeed_rl.checkpoint.names import DEQUANTIZE, check_names
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import why_unreadable
from mindspeed_rl.models.blocks import VALUE_HEAD
from mindspeed_rl.models.hf_files import INDEX, find_weights
from mindspeed_rl.models.safetensors_files import StoredEntry, safetensors_entries
from mindspeed_rl.weight_layouts.base import Piece, ShardLayout, pieces_of

# Element types, in the spelling of safetensors, that need no dequantisation.
_PLAIN_TYPES = ("BF16", "F16", "F32", "F64")


def weight_files(directory: str | Path) -> dict[str, Path]:
    """Map each HF tensor name to the safetensors file that holds the tensor.

    Raises:
        UsageError: No safetensors weights, a broken index, a missing shard, or an unreadable one.
    """
    found = find_weights(directory)
    if isinstance(found, dict):
        return found
    with _open(found) as file:
        return {name: found for name in file.keys()}  # noqa: SIM118 - not a dict


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        path.open("rb").close()  # safe_open calls every file missing that it cannot open
    except OSError as error:
        raise UsageError(f"{path}: {why_unreadable(path, error)}") from error
    try:
        handle = safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{path}: truncated or unreadable safetensors file ({error}); copy or download it again"
        ) from error
    with handle as file:
        yield file


def read_tensor(path: Path, name: str) -> torch.Tensor:
    """Read one whole tensor, in its own element type."""
    with _open(path) as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def check_shapes(directory: str | Path, layout: ShardLayout, rank: int) -> None:
    """Compare shapes of the tensors that this rank will read with the model. Local.

    Only headers are read, so that a wrong config.json is told before memory is taken for it.

    Raises:
        UsageError: A tensor has another shape, or is quantised; names the file and the tensor.
    """
    files = weight_files(directory)
    mine: dict[Path, set[str]] = {}
    for shard in pieces_of(layout, rank):
        name = shard.piece.hf_name
        if name in files:
            mine.setdefault(files[name], set()).add(name)
    for path, names in mine.items():
        entries = safetensors_entries(path)
        for name in sorted(names & entries.keys()):
            check_tensor(path, name, entries[name], layout.hf_shapes[name])


@torch.no_grad()
def load_hf(
    directory: str | Path,
    layout: ShardLayout,
    rank: int,
    params: Mapping[str, torch.Tensor],
    left_out: Collection[str] = (),
    flag: str = "--hf-checkpoint",
) -> None:
    """Fill this rank's parameters from a checkpoint, reading only its own rectangles. Local.

    Only one rectangle at a time is in memory. Padding rows (a padded vocabulary) become 0, and so
    does a value head that the checkpoint lacks.

    Args:
        directory: Directory with safetensors weights.
        layout: Layout that says what this rank holds.
        rank: Global rank.
        params: Local parameters by name; written in place, cast to their dtype.
        left_out: Tensors of the checkpoint that the model does not have by design.
        flag: Flag that names the directory, for messages.

    Raises:
        UsageError: Tensors that are missing, unknown, quantised or of another shape, or whose
            values are not finite or so large that products of two of them are not.
    """
    by_file = wanted_by_file(directory, layout, rank, left_out, flag)
    mine: dict[str, list[Piece]] = {}
    for shard in pieces_of(layout, rank):
        mine.setdefault(shard.piece.hf_name, []).append(shard.piece)
    for param in params.values():
        param.zero_()
    for path, names_of_file in by_file.items():
        entries = safetensors_entries(path)
        with _open(path) as file:
            for name in names_of_file:
                check_tensor(path, name, entries.get(name), layout.hf_shapes[name])
                view = file.get_slice(name)
                for piece in mine.get(name, ()):
                    target = piece.view.of(params[piece.param])[piece.param_box.slices]
                    target.copy_(view[piece.hf_box.slices])
                    check_values(flag, path, name, rank, target)


def wanted_by_file(
    directory: str | Path, layout: ShardLayout, rank: int, left_out: Collection[str], flag: str
) -> dict[Path, list[str]]:
    """Return the tensors of a layout that each file of a checkpoint has. Local.

    Of weights only a tied head and its embedding are read, on rank 0.

    Raises:
        UsageError: Tensors are missing or unknown, or a head differs from its tied embedding.
    """
    files = weight_files(directory)
    names = set(files) - set(left_out)
    wanted = [name for name in layout.hf_shapes if name in files or name != VALUE_HEAD]
    check_names(f"{flag} {directory}", names, wanted)
    # A value head replaces the head that may be tied.
    if rank == 0 and VALUE_HEAD not in layout.hf_shapes:
        check_tie(f"--hf-checkpoint {directory}", files, layout.hf_shapes)
    by_file: dict[Path, list[str]] = {}
    for name in wanted:
        by_file.setdefault(files[name], []).append(name)
    return by_file


def check_values(flag: str, path: Path, name: str, rank: int, values: torch.Tensor) -> None:
    """Refuse weights of a rank that are not finite, or so large that products of them are not.

    Raises:
        UsageError: They are; names the file, the tensor and the rank.
    """
    if problem := problem_of(values, LARGEST_WEIGHT):
        raise UsageError(
            f"{flag}: {path}: {name} holds {problem} in the part of rank {rank}; weights are "
            f"finite and at most {LARGEST_WEIGHT:g}. Copy or download the file again, or take an "
            "earlier checkpoint of the training that wrote it"
        )


def check_tie(where: str, files: Mapping[str, Path], expected: Collection[str]) -> None:
    """Refuse a checkpoint whose head differs from the embedding that the config ties it to.

    Raises:
        UsageError: The two differ.
    """
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head not in files or head in expected or embedding not in files:
        return
    if not torch.equal(read_tensor(files[head], head), read_tensor(files[embedding], embedding)):
        raise UsageError(
            f"{where}: config.json has tie_word_embeddings true, but {head} differs from "
            f"{embedding}; set tie_word_embeddings to false"
        )


def check_tensor(
    path: Path, name: str, entry: StoredEntry | None, expected: tuple[int, ...]
) -> None:
    """Compare a tensor's entry in the header of a file with the model.

    Raises:
        UsageError: It is not there, is quantised, or has another shape.
    """
    if entry is None:
        raise UsageError(f"{path}: lacks {name}, which {INDEX} says is there")
    if entry.shape != tuple(expected):
        raise UsageError(
            f"{path}: {name} has shape {entry.shape}, config.json implies {tuple(expected)}; give "
            "the config.json and the weights of one model"
        )
    if entry.dtype not in _PLAIN_TYPES:
        raise UsageError(
            f"{path}: {name} has the element type {entry.dtype}, allowed are "
            f"{', '.join(_PLAIN_TYPES)}; {DEQUANTIZE}"
        )
