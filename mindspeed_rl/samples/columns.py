"""What is known of every token of a response: each fact is declared here, once.

A column of :data:`RESPONSE_COLUMNS` or :func:`experts_column` is filled from what the engine
returns. It is kept on the device that sampled it, moves to the ranks that train on it, and is
packed, without another line of code. A column of :data:`TRAINING_COLUMNS` is added to packed
micro-batches by a later stage of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mindspeed_rl.core.types import Completion

WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Column:
    """A tensor with one row for each token of a response.

    Attributes:
        name: of it.
        dtype: of its elements.
        filled_by: who knows it.
        width: elements per token.
        read: of one completion, in the order of its tokens: numbers, or bytes of this dtype.
    """

    name: str
    dtype: torch.dtype
    filled_by: str
    width: int = 1
    read: Callable[[Completion], Sequence[float] | bytes] | None = None

    def __post_init__(self) -> None:
        assert self.dtype.itemsize <= WORD_BYTES, "samples travel as 32-bit words"

    def num_bytes(self, num_tokens: int) -> int:
        """Of a sample of so many tokens."""
        return num_tokens * self.width * self.dtype.itemsize

    def num_words(self, num_tokens: int) -> int:
        """32-bit words that hold them."""
        return -(-self.num_bytes(num_tokens) // WORD_BYTES)

    def gather(self, completions: Sequence[Completion]) -> torch.Tensor:
        """[sum of tokens x width] of several completions, one after the other, on the host."""
        assert self.read is not None, f"{self.name} does not come from completions"
        parts = [self.read(c) for c in completions]
        if any(isinstance(p, bytes) for p in parts):
            raw = bytearray(b"".join(bytes(p) for p in parts))  # type: ignore[arg-type]
            # torch refuses to look at an empty buffer
            return torch.frombuffer(raw, dtype=self.dtype) if raw else self.empty()
        return torch.tensor([value for part in parts for value in part], dtype=self.dtype)

    def empty(self) -> torch.Tensor:
        """No tokens at all."""
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


def experts_column(num_experts: int, width: int) -> Column:
    """The experts that the engine chose for each token.

    Args:
        num_experts: of the model; their ids are bytes where that is enough.
        width: layers with experts times experts per token.
    """
    dtype = torch.uint8 if num_experts <= 256 else torch.int16
    return Column("experts", dtype, "the engine", width, read=lambda c: c.experts or b"")


def response_columns(*, has_environment: bool, experts: Column | None) -> tuple[Column, ...]:
    """What a run keeps of every token of a response."""
    mask = (LOSS_MASK,) if has_environment else ()
    return (TOKEN_IDS, ROLLOUT_LOGPROBS, *mask, *((experts,) if experts else ()))


#: by name: added to packed micro-batches, one row for each trained token
TRAINING_COLUMNS = {
    column.name: column
    for column in (
        Column("advantages", torch.float32, "the advantage estimator"),
        Column("old_logprobs", torch.float32, "the pass of the old policy"),
        Column("ref_logprobs", torch.float32, "the pass of the reference"),
        Column("old_values", torch.float32, "the critic at the start of the step"),
        Column("returns", torch.float32, "GAE; NaN where the reward abstained"),
        Column("covariance_mask", torch.bool, "the selection by covariance"),
        Column("on_policy_mask", torch.bool, "the sample table: sampled by the present weights"),
    )
}
