"""Tensors of a run's state beside its models: in a file of their own, not in the record's text.

The record names each tensor where it stands, ``{"tensor": NAME}``; the file is listed in the record
with its checksum like every other one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from mindspeed_rl.core.errors import UsageError

FILE = "run_state.safetensors"
_MARK = "tensor"


def separated(state: Any, path: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """Return nested mappings and sequences without their tensors, and the tensors by name. Local.

    Tensors are brought to the host; the name of each is its path in the state.
    """
    if isinstance(state, torch.Tensor):
        return {_MARK: path}, {path: state.detach().cpu().contiguous()}
    if isinstance(state, Mapping):
        found = {
            key: separated(v, f"{path}.{key}" if path else str(key)) for key, v in state.items()
        }
        plain: Any = {key: value for key, (value, _) in found.items()}
        parts = list(found.values())
    elif isinstance(state, list | tuple):
        parts = [separated(v, f"{path}.{number}") for number, v in enumerate(state)]
        plain = [value for value, _ in parts]
    else:
        return state, {}
    return plain, {name: tensor for _, tensors in parts for name, tensor in tensors.items()}


def joined(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Invert :func:`separated`. Local.

    Raises:
        KeyError: A tensor that the state names is missing.
    """
    if isinstance(plain, Mapping):
        if plain.keys() == {_MARK}:
            return tensors[plain[_MARK]]
        return {key: joined(value, tensors) for key, value in plain.items()}
    if isinstance(plain, list):
        return [joined(value, tensors) for value in plain]
    return plain


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the tensors of a state into the folder of a checkpoint, if there are any. Local.

    Raises:
        OSError: They could not be written.
    """
    if tensors:
        (folder / FILE).write_bytes(save(dict(tensors)))


def with_tensors(folder: Path, plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put the tensors of a checkpoint into the state of its record. Local.

    Raises:
        UsageError: The file is not that of the record.
    """
    path = folder / FILE
    try:
        tensors = load(path.read_bytes()) if path.is_file() else {}
        whole: Mapping[str, Any] = joined(plain, tensors)
    except (OSError, SafetensorError, KeyError) as error:
        raise UsageError(
            f"--load {folder.parent}: {folder.name}/{FILE} cannot be read or lacks a tensor of the "
            f"record ({error}); move this checkpoint away to resume from an earlier one"
        ) from error
    return whole
