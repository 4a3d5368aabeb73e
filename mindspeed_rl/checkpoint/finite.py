"""Finds values that cannot be: NaN and infinities in tensors and in records of a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

#: Weights beyond this overflow fp32 as soon as two of them are multiplied.
LARGEST_WEIGHT = 1e19


def problem_of(tensor: torch.Tensor, largest: float = math.inf) -> str:
    """Describe a value of a tensor that cannot be; empty if there is none. Local.

    Args:
        tensor: Tensor of any shape and dtype; integers are always right.
        largest: Largest absolute value that is allowed.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return ""
    values = tensor.detach()
    if values.device.type == "cpu":
        low, high = map(float, values.aminmax())  # both are NaN if any value is
    else:
        low, high = float(values.min()), float(values.max())
    if math.isnan(low):
        return f"NaN in {_count(values.isnan())} values"
    if math.isinf(low) or math.isinf(high):
        return f"infinity in {_count(values.isinf())} values"
    extreme = max(low, high, key=abs)
    return "" if abs(extreme) <= largest else f"the value {extreme:g}"


def _count(mask: torch.Tensor) -> str:
    return f"{int(mask.sum())} of {mask.numel()}"


def problems_of(tensors: Iterable[tuple[str, torch.Tensor]], limit: int = 3) -> list[str]:
    """Describe the first tensors, by name, that have a value that cannot be. Local."""
    found: list[str] = []
    for name, tensor in tensors:
        if len(found) < limit and (problem := problem_of(tensor)):
            found.append(f"{name}: {problem}")
    return found


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield what is in nested mappings and sequences, each with its keys and positions."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        for position, value in enumerate(tree):
            yield from leaves(value, (*path, position))
    else:
        yield path, tree


def nonfinite_numbers(record: Any, allowed: Collection[str] = ()) -> list[str]:
    """Return the paths of numbers in a record that are NaN or infinite. Local.

    Args:
        record: Nested mappings and sequences, as JSON has them, with tensors.
        allowed: Keys below which such numbers have a meaning.
    """
    found = []
    for path, value in leaves(record):
        name = ".".join(map(str, path))
        if set(path) & set(allowed):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            found.append(f"{name} is {value}")
        elif isinstance(value, torch.Tensor) and (problem := problem_of(value)):
            found.append(f"{name} has {problem}")
    return found
