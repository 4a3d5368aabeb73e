"""The interface between the training loop and an inference engine.

All ranks of an engine that share prompts make the same calls with the same arguments; different
engines are independent.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

import torch

from mindspeed_rl.core.types import Completion
from mindspeed_rl.rollout.rebalance import Rebalancer
from mindspeed_rl.rollout.requests import GenerationRequest, NewTokens, SamplingSettings
from mindspeed_rl.rollout.stats import StepStats
from mindspeed_rl.weights.sync import WeightReceiver

T = TypeVar("T")


class EngineState(enum.Enum):
    """Which parts of the engine are in memory."""

    ASLEEP = "asleep"  # neither weights nor cache
    WEIGHTS = "without its cache"  # weights alone
    AWAKE = "awake"  # weights and key/value cache


OnStep: TypeAlias = Callable[[Mapping[int, Completion]], None]
"""Callback after every step of an engine, with the completions that the step finished by id."""


class Arrivals(Protocol):
    """Requests that come while others are generated, equal on the ranks that share them.

    Attributes:
        num_awaited: Number of requests that may still come.
    """

    num_awaited: int

    def take(self, *, wait: bool) -> Sequence[GenerationRequest]:
        """Return what has come since the last call. Collective: the ranks that share requests.

        The engine calls it between two steps; with ``wait`` it has nothing to do meanwhile.
        """
        ...

    def show(self, sampled: Mapping[int, NewTokens]) -> None:
        """Get the tokens that a step added to watched requests and that did not end them. Local."""
        ...


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
        arrivals: Arrivals | None = None,
    ) -> dict[int, Completion]:
        """Sample one completion per request and return those that ended on this rank, by id.

        Collective: the ranks of the engine; with ``rebalancer``, which moves requests between
        engines, the world. ``on_step`` is for work that can be done while other completions are
        still being sampled. ``arrivals`` has further requests, of which one may have the id of an
        earlier one that has ended; the last completion of an id is returned.
        """
        ...

    def take_expert_load(self) -> torch.Tensor:
        """Return how many tokens went to each expert since the last call: [layers, experts] int64.

        Of the layers whose tokens the engine was built to count; on the host. The sum over the
        ranks has every token that a request made an engine compute once. Local.
        """
        ...

    def from_leader(self, value: T | None) -> T:
        """Return the value of the first of the ranks that share requests; others give ``None``.

        Collective: the ranks that share requests.
        """
        ...
