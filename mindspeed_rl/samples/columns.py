"""Declarations of everything that is known of every token of a response.

A column of :func:`response_columns` is filled from a completion. It is compared between the ranks
of an engine, kept on the device that sampled it, moves to the ranks that train on it and is packed,
without further code. A column of :data:`TRAINING_COLUMNS` is added to packed micro-batches by a
later stage of the step.

One fact of a token is no column: the version of the weights that sampled it. Weights change between
passes of generation only, so the versions of a response are a few spans, which every rank reads to
decide what is stale, also ranks without its tokens. They are part of the sample table
(:attr:`~mindspeed_rl.samples.rollout_info.RolloutInfo.earlier_versions`); what a loss needs of them
is the column ``on_policy_mask``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mindspeed_rl.core.types import Completion

WORD_BYTES = 4
_NAN = struct.pack("f", math.nan)


@dataclass(frozen=True, slots=True)
class Column:
    """A tensor with one row for each token of a response.

    Attributes:
        name: Name of the column.
        dtype: Element type.
        filled_by: Description of what computes the values, for messages.
        width: Elements per token.
        read: Function that returns the values of one completion, in the order of its tokens:
            numbers, or bytes of this dtype. None: the column does not come from completions.
    """

    name: str
    dtype: torch.dtype
    filled_by: str
    width: int = 1
    read: Callable[[Completion], Sequence[float] | bytes] | None = None

    def __post_init__(self) -> None:
        assert self.dtype.itemsize <= WORD_BYTES, "samples travel as 32-bit words"

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a sample with ``num_tokens`` tokens."""
        return num_tokens * self.width * self.dtype.itemsize

    def num_words(self, num_tokens: int) -> int:
        """Return the 32-bit words that hold a sample with ``num_tokens`` tokens."""
        return -(-self.num_bytes(num_tokens) // WORD_BYTES)

    def gather(self, completions: Sequence[Completion]) -> torch.Tensor:
        """Concatenate the values of several completions, on the host: [sum of tokens x width]."""
        assert self.read is not None, f"{self.name} does not come from completions"
        parts = [self.read(c) for c in completions]
        if any(isinstance(p, bytes) for p in parts):
            raw = bytearray(b"".join(bytes(p) for p in parts))  # type: ignore[arg-type]
            # torch.frombuffer refuses an empty buffer.
            return torch.frombuffer(raw, dtype=self.dtype) if raw else self.empty()
        return torch.tensor([value for part in parts for value in part], dtype=self.dtype)

    def empty(self) -> torch.Tensor:
        """Return a tensor without tokens."""
        return torch.zeros(0, dtype=self.dtype)


TOKEN_IDS = Column("token_ids", torch.int32, "the engine", read=lambda c: c.token_ids)
ROLLOUT_LOGPROBS = Column(
    "rollout_logprobs", torch.float32, "the engine", read=lambda c: c.logprobs
)
LOSS_MASK = Column(
    "loss_mask",
    torch.bool,
    "the environment: false at the tokens that it wrote",
    read=lambda c: c.loss_mask or (True,) * len(c.token_ids),
)

EARLY_OLD = Column(
    "early_old_logprobs",
    torch.float32,
    "the pass of the old policy during the rollout; NaN where it comes later",
    read=lambda c: (c.early and c.early.old) or _NAN * len(c.token_ids),
)
EARLY_REFERENCE = Column(
    "early_ref_logprobs",
    torch.float32,
    "the pass of the reference during the rollout; NaN where it comes later",
    read=lambda c: (c.early and c.early.reference) or _NAN * len(c.token_ids),
)
#: Columns of the passes that may run while the last responses are generated, by name of the pass.
EARLY_COLUMNS = {"old": EARLY_OLD, "reference": EARLY_REFERENCE}


def experts_column(num_experts: int, width: int) -> Column:
    """Make the column of the experts that the engine chose for each token.

    Args:
        num_experts: Number of experts of the model; ids are single bytes where that is enough.
        width: Number of layers with experts times experts per token.
    """
    dtype = torch.uint8 if num_experts <= 256 else torch.int16
    return Column("experts", dtype, "the engine", width, read=lambda c: c.experts or b"")


def response_columns(
    *, has_environment: bool, experts: Column | None, early_passes: Sequence[str] = ()
) -> tuple[Column, ...]:
    """Return the columns that a run keeps for every token of a response."""
    mask = (LOSS_MASK,) if has_environment else ()
    early = [EARLY_COLUMNS[name] for name in early_passes]
    return (TOKEN_IDS, ROLLOUT_LOGPROBS, *mask, *((experts,) if experts else ()), *early)


#: Columns of packed micro-batches by name, with one row for each trained token.
TRAINING_COLUMNS = {
    column.name: column
    for column in (
        Column("advantages", torch.float32, "the advantage estimator"),
        Column("old_logprobs", torch.float32, "the pass of the old policy"),
        Column("ref_logprobs", torch.float32, "the pass of the reference"),
        Column("teacher_logprobs", torch.float32, "the pass of the teachers; NaN without one"),
        Column("old_values", torch.float32, "the critic at the start of the step"),
        Column("returns", torch.float32, "GAE; NaN where the reward abstained"),
        Column("covariance_mask", torch.bool, "the selection by covariance"),
        Column("on_policy_mask", torch.bool, "the sample table: sampled by the present weights"),
    )
}
