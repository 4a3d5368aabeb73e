"""The record of a step: what every stage of its computation gave, in order, whatever the layout.

On disk it is a file of NumPy (.npz) without pickled objects: arrays, and a header in JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import atomic_path

FORMAT = "mindspeed_rl.step_record"
VERSION = 1


@dataclass(frozen=True, eq=False, slots=True)
class TokenStage:
    """A value of every token, ordered by sample and place in it.

    Attributes:
        name: Stage in words.
        sample: [n] int64, number of the sample in the step.
        place: [n] int64, place of the token in prompt and response, from 0 on.
        value: [n] int64 or fp32.
    """

    kind: ClassVar[str] = "tokens"
    name: str
    sample: NDArray[np.int64]
    place: NDArray[np.int64]
    value: NDArray[Any]


@dataclass(frozen=True, eq=False, slots=True)
class SampleStage:
    """A digest of every sample: that of the hidden states of its tokens after a layer.

    Attributes:
        name: Stage in words.
        sample: [S] int64, in order.
        rank: [S] int64, first rank that computed a part of it.
        digest: [S, WIDTH] fp64; see :mod:`mindspeed_rl.replay.digests`.
    """

    kind: ClassVar[str] = "samples"
    name: str
    sample: NDArray[np.int64]
    rank: NDArray[np.int64]
    digest: NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class TensorStage:
    """A digest of every tensor of a model: of its gradient, or of what an update changed.

    Attributes:
        name: Stage in words.
        tensor: [P], Hugging Face names, in the order of the computation.
        digest: [P, WIDTH] fp64.
        is_update: Whether it is what an optimizer step changed.
    """

    kind: ClassVar[str] = "tensors"
    name: str
    tensor: NDArray[np.str_]
    digest: NDArray[np.float64]
    is_update: bool


RecordStage = TokenStage | SampleStage | TensorStage
_KINDS: Mapping[str, type[Any]] = {s.kind: s for s in (TokenStage, SampleStage, TensorStage)}


@dataclass(frozen=True, eq=False, slots=True)
class StepRecord:
    """What a step computed.

    Attributes:
        step: Number of the step.
        layout: Sizes of training and rollout layout, by name.
        flags: Flag -> value, of all that the numbers may depend on.
        stages: In the order of the computation.
    """

    step: int
    layout: Mapping[str, int]
    flags: Mapping[str, str]
    stages: tuple[RecordStage, ...]

    @property
    def num_values(self) -> int:
        """Number of values that are compared."""
        return sum(len(s.value if isinstance(s, TokenStage) else s.digest) for s in self.stages)


def save_record(record: StepRecord, path: Path) -> None:
    """Write a record, which replaces nothing unless it is complete."""
    arrays: dict[str, Any] = {}
    stages = []
    for number, stage in enumerate(record.stages):
        fields: dict[str, Any] = {"kind": stage.kind, "name": stage.name}
        if isinstance(stage, TensorStage):
            fields["is_update"] = stage.is_update
        for name in _arrays_of(type(stage)):
            arrays[f"{number}.{name}"] = getattr(stage, name)
        stages.append(fields)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "step": record.step,
        "layout": dict(record.layout),
        "flags": dict(record.flags),
        "stages": stages,
    }
    with atomic_path(path) as temporary:
        np.savez_compressed(temporary, header=np.array(json.dumps(header)), **arrays)


def _arrays_of(kind: type[RecordStage]) -> list[str]:
    return [name for name in kind.__slots__ if name not in ("name", "is_update")]


def read_record(path: str | os.PathLike[str]) -> StepRecord:
    """Read a record.

    Raises:
        UsageError: There is no such file, or it is not a record of this version.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            if header["format"] != FORMAT or header["version"] != VERSION:
                raise ValueError("another format or version")
            stages = tuple(
                _KINDS[fields.pop("kind")](
                    **fields,
                    **{
                        name: file[f"{number}.{name}"]
                        for name in _arrays_of(_KINDS[header["stages"][number]["kind"]])
                    },
                )
                for number, fields in enumerate([dict(f) for f in header["stages"]])
            )
            return StepRecord(header["step"], header["layout"], header["flags"], stages)
    except Exception as error:  # a damaged archive may end in any
        raise UsageError(
            f"{path} is not the record of a replay ({error or type(error).__name__}); name a file "
            "that a replay of this version of mindspeed_rl wrote, or remove it"
        ) from None


# --- parts of ranks ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class TokenValues:
    """Values of tokens on a rank, in any order: arrays as of :class:`TokenStage`."""

    sample: NDArray[np.int64]
    place: NDArray[np.int64]
    value: NDArray[Any]


TOKENS, TARGETS = "tokens", "targets"
"""Names of the columns of :class:`PassPart` with token ids: of those read and those predicted."""


@dataclass(slots=True)
class PassPart:
    """What a rank knows of one pass of a model over the micro-batches of an optimizer step.

    Attributes:
        name: Pass in words, the same on all ranks.
        columns: What was known of tokens before the pass, by name, as far as it is new.
        hidden: Layer, 0 for what enters the first one -> sample -> its digest.
        outputs: What the head gave, by name.
        gradients: Hugging Face name -> digest of what this rank owns of the gradient.
        updates: The same of what the optimizer step changed.
    """

    name: str
    columns: dict[str, list[TokenValues]] = field(default_factory=dict)
    hidden: dict[int, dict[int, NDArray[np.float64]]] = field(default_factory=dict)
    outputs: dict[str, list[TokenValues]] = field(default_factory=dict)
    gradients: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    updates: dict[str, NDArray[np.float64]] = field(default_factory=dict)


def merged_stages(
    parts: Sequence[Sequence[PassPart]], tensors: Mapping[str, Sequence[str]]
) -> tuple[RecordStage, ...]:
    """Merge the parts of all ranks. Pure.

    Args:
        parts: Passes in their order, by rank.
        tensors: Role -> Hugging Face names of the tensors of the model, in its order.
    """
    return tuple(
        stage for passes in zip(*parts, strict=True) for stage in _stages_of_pass(passes, tensors)
    )


def _stages_of_pass(
    ranks: Sequence[PassPart], tensors: Mapping[str, Sequence[str]]
) -> Iterable[RecordStage]:
    name = ranks[0].name
    assert all(rank.name == name for rank in ranks), "all ranks do the same passes"
    columns = _columns(ranks, "columns")
    if TOKENS in columns:
        yield from _token_stages(name, columns.pop(TOKENS), columns.pop(TARGETS))
    for what, values in columns.items():
        yield TokenStage(f"{name}, {what}", values.sample, values.place, values.value)
    for layer in sorted({layer for rank in ranks for layer in rank.hidden}):
        where = f"after layer {layer}" if layer else "before layer 1"
        yield _sample_stage(
            f"{name}, hidden states {where}", [r.hidden.get(layer, {}) for r in ranks]
        )
    for what, values in _columns(ranks, "outputs").items():
        yield TokenStage(f"{name}, {what}", values.sample, values.place, values.value)
    order = list(tensors[name.rsplit(" ", 2)[0]])
    if any(rank.gradients for rank in ranks):
        yield _tensor_stage(f"{name}, gradient", [r.gradients for r in ranks], order[::-1], False)
    if any(rank.updates for rank in ranks):
        yield _tensor_stage(f"{name}, change of weights", [r.updates for r in ranks], order, True)


def _columns(ranks: Sequence[PassPart], field_name: str) -> dict[str, TokenValues]:
    """Return every column of all ranks, ordered by sample and place, each token once."""
    names = dict.fromkeys(name for rank in ranks for name in getattr(rank, field_name))
    return {
        name: _ordered([v for rank in ranks for v in getattr(rank, field_name).get(name, [])])
        for name in names
    }


def _ordered(parts: Sequence[TokenValues]) -> TokenValues:
    sample, place, value = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("sample", "place", "value")
    )
    order = np.lexsort((place, sample))
    sample, place, value = sample[order], place[order], value[order]
    is_first = np.ones(len(sample), dtype=bool)
    is_first[1:] = (sample[1:] != sample[:-1]) | (place[1:] != place[:-1])
    return TokenValues(sample[is_first], place[is_first], value[is_first])


def _token_stages(name: str, read: TokenValues, predicted: TokenValues) -> Iterable[TokenStage]:
    """Yield the tokens of the prompts, then those of the responses."""
    every = _ordered([read, predicted])
    first = np.full(int(every.sample.max()) + 1 if len(every.sample) else 0, np.iinfo(np.int64).max)
    np.minimum.at(first, predicted.sample, predicted.place)
    is_prompt = every.place < first[every.sample]
    for what, chosen in (("prompts", is_prompt), ("responses", ~is_prompt)):
        yield TokenStage(
            f"{name}, tokens of {what}",
            every.sample[chosen],
            every.place[chosen],
            every.value[chosen],
        )


def _sample_stage(name: str, ranks: Sequence[Mapping[int, NDArray[np.float64]]]) -> SampleStage:
    samples = sorted({sample for rank in ranks for sample in rank})
    holders = {s: [r for r, found in enumerate(ranks) if s in found] for s in samples}
    return SampleStage(
        name,
        np.array(samples, dtype=np.int64),
        np.array([holders[s][0] for s in samples], dtype=np.int64),
        np.array([sum(ranks[r][s] for r in holders[s]) for s in samples]),
    )


def _tensor_stage(
    name: str,
    ranks: Sequence[Mapping[str, NDArray[np.float64]]],
    order: Sequence[str],
    is_update: bool,
) -> TensorStage:
    known = [n for n in order if any(n in rank for rank in ranks)]
    digests = [sum(rank[n] for rank in ranks if n in rank) for n in known]
    return TensorStage(name, np.array(known), np.array(digests), is_update)
