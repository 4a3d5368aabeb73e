"""The interface between the training loop and an inference engine: protocol, requests and seeds.

All ranks of an engine that share prompts make the same calls with the same arguments; different
engines are independent.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from mindspeed_rl.core.types import Completion
from mindspeed_rl.weights.sync import WeightReceiver

if TYPE_CHECKING:
    import torch

    from mindspeed_rl.rollout.rebalance import Rebalancer
    from mindspeed_rl.rollout.step_loop import StepStats


class EngineState(enum.Enum):
    """Which parts of the engine are in memory."""

    ASLEEP = "asleep"  # neither weights nor cache
    WEIGHTS = "without its cache"  # weights alone
    AWAKE = "awake"  # weights and key/value cache


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Settings of sampling; the distribution is never truncated.

    Attributes:
        temperature: Sampling temperature; 0 is greedy.
        max_response_tokens: Limit of the tokens of one response.
        stop_token_ids: Tokens that end a response and are part of it.
    """

    temperature: float
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to generate.

    Attributes:
        sample_id: Id of the sample, and of its completion.
        token_ids: Tokens of the prompt.
        seed: Seed of the sample's own random stream.
        max_tokens: Limit of this response; ``None`` is that of the settings.
        prefix_tokens: Tokens that the response already has; the completion contains them.
        prefix_logprobs: Log-probs of ``prefix_tokens`` under the engines that sampled them.
        stream: State of the random generator after ``prefix_tokens``, uint8; ``None`` starts from
            the seed.
    """

    sample_id: int
    token_ids: tuple[int, ...]
    seed: int
    max_tokens: int | None = None
    prefix_tokens: tuple[int, ...] = ()
    prefix_logprobs: tuple[float, ...] = ()
    stream: torch.Tensor | None = field(default=None, compare=False)


OnStep: TypeAlias = Callable[[Mapping[int, Completion]], None]
"""Callback after every step of an engine, with the completions that the step finished by id."""


def request_seed(run_seed: int, step: int, sample_id: int, k: int = 0, turn: int = 0) -> int:
    """Return the seed of one sample, a hash of what the sample is and not of where it runs.

    Args:
        run_seed: Value of ``--seed``.
        step: RL step.
        sample_id: Id of the sample, which is equal in every layout.
        k: Attempt, for resampling.
        turn: Turn of a conversation with an environment.

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
    """Return 16 bytes that are equal on ranks with the same requests, settings and weights."""
    state = hashlib.blake2b(repr((settings, version)).encode(), digest_size=16)
    for request in requests:
        ids = (*request.token_ids, *request.prefix_tokens)
        limit = -1 if request.max_tokens is None else request.max_tokens
        state.update(struct.pack("<4q", request.sample_id, request.seed, limit, len(ids)))
        state.update(struct.pack(f"<{len(ids)}q", *ids))
    return state.digest()


class InferenceEngine(WeightReceiver, Protocol):
    """An inference engine on this rank.

    Attributes:
        stats: Counters of its steps since the caller last replaced them.
    """

    stats: StepStats

    @property
    def state(self) -> EngineState:
        """Which parts of the engine are in memory."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on this rank while they are in memory."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key/value cache on this rank while it is in memory."""
        ...

    def free_cache(self) -> None:
        """Free the key/value cache; no effect when it is freed already. Local."""
        ...

    def free_weights(self) -> None:
        """Free the weights after the cache; they need a whole update afterwards. Local."""
        ...

    def wake_weights(self) -> None:
        """Allocate the weights again, all or nothing; their content is undefined. Local."""
        ...

    def wake_cache(self) -> None:
        """Allocate the key/value cache again after the weights, all or nothing. Local."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Number of sequences that run at once on this rank."""
        ...

    @property
    def weight_format(self) -> str:
        """Description of the memory format of the weights, for the log; may be empty."""
        ...

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float,
        with_entropy: bool,
        trainer_version: int,
    ) -> list[list[tuple[float, float]]]:
        """Return log-prob and entropy of every token after the first of each sequence.

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
        """Sample one completion per request and return those that ended on this rank, by id.

        Collective: the ranks of the engine; with ``rebalancer``, which moves requests between
        engines, the world. ``on_step`` is for work that can be done while other completions are
        still being sampled.
        """
        ...
