"""Exchanges between engines that hold conversations, from one turn to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from mindspeed_rl.parallel.small_collectives import gather_objects


@dataclass(frozen=True, slots=True)
class Continuation:
    """A sample whose next turn is to be generated.

    Attributes:
        sample_id: Position of the sample in the step.
        max_tokens: Largest number of tokens of the turn.
        token_ids: Tokens of the conversation since the beginning of its last turn.
    """

    sample_id: int
    max_tokens: int
    token_ids: tuple[int, ...]


def exchange_continuations(mine: Sequence[Continuation]) -> list[Continuation]:
    """Gather the continuations of all ranks on every rank, by sample id. Collective: the world."""
    return sorted(chain.from_iterable(gather_objects(mine)), key=lambda c: c.sample_id)
