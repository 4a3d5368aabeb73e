"""What the training loop asks of an inference engine, and the pure parts of a request.

One engine is ``tp`` consecutive ranks. All ranks of an engine make the same calls with the same
arguments; different engines are independent.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from mindspeed_rl.core.types import Completion
from mindspeed_rl.weights.sync import WeightReceiver

if TYPE_CHECKING:
    from mindspeed_rl.rollout.rebalance import Rebalancer
    from mindspeed_rl.rollout.step_loop import StepStats


class EngineState(enum.Enum):
    """What of the engine is in memory."""

    ASLEEP = "asleep"  # neither weights nor cache
    WEIGHTS = "without its cache"
    AWAKE = "awake"  # weights and key/value cache


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to sample; everything else is fixed to the untruncated distribution.

    Attributes:
        temperature: 0 is greedy.
        max_response_tokens: limit of one response.
        stop_token_ids: sampling one of these ends a response; it is part of it.
    """

    temperature: float
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to generate.

    Attributes:
        sample_id: of the completion.
        token_ids: what the model reads first.
        seed: of its own random stream.
        max_tokens: limit of this response where it is not that of the settings.
        prefix_tokens: tokens that there are of the response; the answer has them as well.
        prefix_logprobs: of those, by the engines that sampled them.
    """

    sample_id: int
    token_ids: tuple[int, ...]
    seed: int
    max_tokens: int | None = None
    prefix_tokens: tuple[int, ...] = ()
    prefix_logprobs: tuple[float, ...] = ()


OnStep: TypeAlias = Callable[[Mapping[int, Completion]], None]
"""Called after every step of an engine with the completions that it finished, by sample id."""


def request_seed(run_seed: int, step: int, sample_id: int, k: int = 0, turn: int = 0) -> int:
    """The seed of one sample: a hash of what it is, not of where it runs.

    Args:
        run_seed: ``--seed``.
        step: RL step.
        sample_id: equal in every layout.
        k: attempt, for resampling.
        turn: of a conversation with an environment.

    Returns:
        An integer in [0, 2^63).
    """
    message = struct.pack("<4q", run_seed, step, sample_id, k)
    if turn:
        message += struct.pack("<q", turn)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


def requests_digest(
    requests: Sequence[GenerationRequest], settings: SamplingSettings, version: int
) -> bytes:
    """16 bytes that are equal when two ranks are about to generate the same thing."""
    state = hashlib.blake2b(repr((settings, version)).encode(), digest_size=16)
    for request in requests:
        ids = (*request.token_ids, *request.prefix_tokens)
        limit = -1 if request.max_tokens is None else request.max_tokens
        state.update(struct.pack("<4q", request.sample_id, request.seed, limit, len(ids)))
        state.update(struct.pack(f"<{len(ids)}q", *ids))
    return state.digest()


class InferenceEngine(WeightReceiver, Protocol):
    """An engine on this rank.

    Attributes:
        stats: what was stepped since somebody reset it.
    """

    stats: StepStats

    @property
    def state(self) -> EngineState:
        """What is in memory."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights on this rank while they are there."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Memory of the key/value cache on this rank while it is there."""
        ...

    def free_cache(self) -> None:
        """Give the key/value cache back; no effect when it is away. Local."""
        ...

    def free_weights(self) -> None:
        """Give the weights back after the cache; they need a whole update afterwards. Local."""
        ...

    def wake(self, tags: Sequence[str]) -> None:
        """Bring back ``"weights"``, then ``"kv_cache"``. Local; all of a tag or nothing."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once on this rank."""
        ...

    @property
    def weight_format(self) -> str:
        """What is known of the memory format of the weights, for people; may be empty."""
        ...

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float,
        with_entropy: bool,
        trainer_version: int,
    ) -> list[list[tuple[float, float]]]:
        """log-prob and entropy of every token after the first of each sequence.

        Collective: the ranks of the engine.
        """
        ...

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        settings: SamplingSettings,
        trainer_version: int,
        on_step: OnStep | None = None,
        rebalancer: Rebalancer | None = None,
    ) -> dict[int, Completion]:
        """Sample one completion per request: those that ended on this rank, by sample id.

        Collective: the ranks of the engine; with ``rebalancer``, which moves requests between
        engines, the world. ``on_step`` is for work that may be done while others are still being
        sampled.
        """
        ...
