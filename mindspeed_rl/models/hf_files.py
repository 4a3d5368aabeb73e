"""Names of the files of a Hugging Face checkpoint directory, and checks that they are there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import why_unreadable

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# A tokenizer's vocabulary is in one of these. Where none is there, transformers makes an empty
# tokenizer of the directory's config.json instead of failing.
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
)


def shard_names(count: int) -> list[str]:
    """Names of the weight files of a checkpoint of ``count`` files, as transformers reads them."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def index_text(file_of: Mapping[str, str], num_bytes: int) -> str:
    """The text of the index of a checkpoint of several files; :func:`read_index` reads it.

    Args:
        file_of: Name of the file that holds each HF tensor.
        num_bytes: Bytes of all tensors together.
    """
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(file_of)}
    return json.dumps(index, indent=2, sort_keys=True)


def read_index(index: Path) -> dict[str, str]:
    """Read an index of safetensors files: HF tensor name -> file name.

    Raises:
        UsageError: The file is no such index.
    """
    try:
        mapping: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(_is_name(file) for file in mapping.values()):
            raise ValueError("a tensor is in a file outside the directory of the index")
    except OSError as error:
        raise UsageError(f"{index}: {why_unreadable(index, error)}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(f"{index}: no index of safetensors files: {error!r}") from error
    return mapping


def _is_name(file: object) -> bool:
    """Whether a file is in the directory of its index: a model reads no others."""
    return isinstance(file, str) and Path(file).name == file and file != ".."


def find_weights(directory: str | Path, flag: str = "--hf-checkpoint") -> dict[str, Path] | Path:
    """Find the weight files without opening them. Local.

    Args:
        directory: Directory of the checkpoint.
        flag: Flag that names the directory, for messages.

    Returns:
        HF tensor name -> file where there is an index; else the one file.

    Raises:
        UsageError: There are no safetensors weights, the index is broken, or a shard is missing.
    """
    root = Path(directory)
    index, single = root / INDEX, root / SINGLE
    try:
        has_index = index.is_file()
    except OSError as error:  # the directory is closed to this user
        raise UsageError(f"{flag} {root}: {why_unreadable(index, error)}") from error
    if has_index:
        mapping = read_index(index)
        missing = sorted({f for f in mapping.values() if not (root / f).is_file()})
        if missing:
            total = len(set(mapping.values()))
            raise UsageError(
                f"{flag} {root}: {len(missing)} of the {total} files that {INDEX} names "
                f"are missing, first {missing[0]}; copy or download the checkpoint again"
            )
        return {name: root / file for name, file in mapping.items()}
    if not single.is_file():
        raise UsageError(
            f"{flag} {root}: neither {INDEX} nor {SINGLE} is there; give a directory with "
            "safetensors weights"
        )
    return single


def check_tokenizer_files(directory: str | Path, flag: str) -> None:
    """Refuse a directory without a tokenizer's vocabulary. Local.

    Args:
        directory: Directory of the tokenizer.
        flag: Flag that names the directory, for messages.

    Raises:
        UsageError: The directory or a vocabulary in it is missing.
    """
    root = Path(directory)
    if not root.is_dir():
        raise UsageError(f"{flag} {directory}: no such directory; give one with a tokenizer")
    if not any((root / name).is_file() for name in VOCABULARY_FILES):
        raise UsageError(
            f"{flag} {directory}: no tokenizer is there (none of {', '.join(VOCABULARY_FILES)}); "
            "copy the model's tokenizer files into it, or give their directory as "
            "--tokenizer-name-or-path"
        )
