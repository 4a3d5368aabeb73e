"""Finds where two records of a step differ first, in the order of the computation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_rl.replay.digests import norm, relative_difference
from mindspeed_rl.replay.record import (
    RecordStage,
    SampleStage,
    StepRecord,
    TensorStage,
    TokenStage,
)

# Gradients are compared relative to their own norm plus this share of that of all gradients: some,
# like those of the biases of keys, are rounding alone.
_GRADIENT_FLOOR = 1e-2


@dataclass(frozen=True, slots=True)
class StageDifference:
    """The first difference within a stage.

    Attributes:
        stage: Stage in words.
        where: Sample, token, or tensor.
        values: What both records have there, or by how much they differ.
    """

    stage: str
    where: str
    values: str

    def __str__(self) -> str:
        return ": ".join(text for text in (self.stage, self.where, self.values) if text)


def differences(mine: StepRecord, other: StepRecord, tolerance: float) -> list[StageDifference]:
    """Return the first difference of every stage that differs, in the order of ``mine``. Pure.

    Args:
        mine: Record of this replay.
        other: Record to compare with.
        tolerance: Largest relative difference that counts as equal; 0 compares bits.
    """
    theirs = {stage.name: stage for stage in other.stages}
    found = []
    for stage in mine.stages:
        match = theirs.pop(stage.name, None)
        if match is None:
            found.append(StageDifference(stage.name, "only in this replay", ""))
        elif (first := _first(stage, match, tolerance)) is not None:
            found.append(StageDifference(stage.name, *first))
    return found + [StageDifference(name, "only in the other record", "") for name in theirs]


def changed_flags(mine: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    """Yield the flags that differ, with both values."""
    for name in sorted(mine.keys() | other.keys()):
        a, b = mine.get(name, ""), other.get(name, "")
        if a != b:
            yield f"{name} {a or 'unset'} (was {b or 'unset'})"


def _first(mine: RecordStage, other: RecordStage, tolerance: float) -> tuple[str, str] | None:
    """Return where two stages differ first, and what is there; ``None``: they are equal."""
    match mine, other:
        case TokenStage(), TokenStage():
            return _first_token(mine, other, tolerance)
        case SampleStage(), SampleStage():
            return _first_sample(mine, other, tolerance)
        case TensorStage(), TensorStage():
            if mine.is_update and tolerance:
                return _whole_update(mine, other, tolerance)
            return _first_tensor(mine, other, tolerance)
    return "another kind of stage", ""


def _first_token(mine: TokenStage, other: TokenStage, tolerance: float) -> tuple[str, str] | None:
    keys = [np.stack([s.sample, s.place], axis=1) for s in (mine, other)]
    if not np.array_equal(keys[0], keys[1]):
        pairs = [set(map(tuple, k.tolist())) for k in keys]
        sample, place = min(pairs[0] ^ pairs[1])
        whose = "this replay" if (sample, place) in pairs[0] else "the other record"
        # What differs before that in the same sample or an earlier one comes first.
        both = np.array([tuple(k) in pairs[1] for k in keys[0].tolist()], dtype=bool)
        theirs = np.array([tuple(k) in pairs[0] for k in keys[1].tolist()], dtype=bool)
        before = _first_value(keys[0][both], mine.value[both], other.value[theirs], tolerance)
        if before is not None and before[0] < (sample, place):
            return before[1]
        return f"sample {sample}, token {place}", f"only in {whose}"
    found = _first_value(keys[0], mine.value, other.value, tolerance)
    return found[1] if found is not None else None


def _first_value(
    keys: NDArray[np.int64], mine: NDArray[Any], other: NDArray[Any], tolerance: float
) -> tuple[tuple[int, int], tuple[str, str]] | None:
    """Return the first token whose values differ: its sample and place, and the words for it."""
    wrong = np.flatnonzero(_differ(mine, other, tolerance))
    if not len(wrong):
        return None
    sample, place = keys[wrong[0]].tolist()
    a, b = mine[wrong[0]].item(), other[wrong[0]].item()
    return (sample, place), (f"sample {sample}, token {place}", f"{a!r} instead of {b!r}")


def _differ(a: NDArray[Any], b: NDArray[Any], tolerance: float) -> NDArray[np.bool_]:
    """Return where values differ by more than ``tolerance`` x max(1, |b|); NaN equals NaN."""
    same = (a == b) | ((a != a) & (b != b))
    if not tolerance or a.dtype.kind == "i" or b.dtype.kind == "i":
        return np.asarray(~same)
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= tolerance * np.maximum(1.0, np.abs(b))
    return np.asarray(~(same | near))


def _first_sample(
    mine: SampleStage, other: SampleStage, tolerance: float
) -> tuple[str, str] | None:
    digests = dict(zip(other.sample.tolist(), other.digest, strict=True))
    for sample, rank, digest in zip(
        mine.sample.tolist(), mine.rank.tolist(), mine.digest, strict=True
    ):
        where = f"sample {sample}, computed by rank {rank}"
        if sample not in digests:
            return where, "only in this replay"
        size = relative_difference(digest, digests.pop(sample))
        if size > tolerance:
            return where, f"relative difference {size:.2g}"
    return next(((f"sample {s}", "only in the other record") for s in digests), None)


def _first_tensor(
    mine: TensorStage, other: TensorStage, tolerance: float
) -> tuple[str, str] | None:
    digests = dict(zip(other.tensor.tolist(), other.digest, strict=True))
    floor = _GRADIENT_FLOOR * norm(other.digest.sum(0)) if tolerance and len(other.digest) else 0.0
    for name, digest in zip(mine.tensor.tolist(), mine.digest, strict=True):
        if name not in digests:
            return name, "only in this replay"
        size = relative_difference(digest, digests.pop(name), floor)
        if size > tolerance:
            return name, f"relative difference {size:.2g}"
    return next(((name, "only in the other record") for name in digests), None)


def _whole_update(
    mine: TensorStage, other: TensorStage, tolerance: float
) -> tuple[str, str] | None:
    """Compare the norms of what an update changed in all tensors together.

    AdamW makes full steps of gradients that are rounding alone, so with a tolerance single elements
    of an update say nothing.
    """
    a, b = (norm(s.digest.sum(0)) if len(s.digest) else 0.0 for s in (mine, other))
    if abs(a - b) <= max(tolerance, 1e-2) * b:
        return None
    return "all tensors together", f"norm {a:.6g} instead of {b:.6g}"
