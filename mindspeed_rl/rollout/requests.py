"""What an inference engine is asked for: settings of sampling, requests and their seeds."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Settings of sampling; the distribution is never truncated.

    Attributes:
        temperature: Sampling temperature; 0 is greedy.
        max_response_tokens: Limit of the tokens of one response.
        stop_token_ids: Tokens that end a response and are part of it; empty: none does, so that
            every response is as long as it may be.
    """

    temperature: float
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to generate.

    Attributes:
        sample_id: Id of the sample, and of its completion.
        token_ids: Tokens of the prompt; in a conversation, all before this turn.
        seed: Seed of the sample; with the position of a token it decides the token's noise.
        max_tokens: Limit of this response; ``None`` is that of the settings.
        prefix_tokens: Tokens that the response already has; the completion contains them.
        prefix_logprobs: Log-probs of ``prefix_tokens`` under the engines that sampled them.
        opening: Number of the tokens in ``token_ids`` that are the prompt of the first turn;
            ``None``: all. Drafts of a later turn come from earlier responses to it.
        later_tokens: In partial rollouts, how many tokens later calls may add to a response that
            reaches its limit; an engine that can keeps what it has computed of it. ``None``: the
            response ends in this call.
        temperature: Sampling temperature of this response; ``None`` is that of the settings.
        watched: Whether its tokens are shown while it is sampled; see ``Arrivals.show``.
    """

    sample_id: int
    token_ids: tuple[int, ...]
    seed: int
    max_tokens: int | None = None
    prefix_tokens: tuple[int, ...] = ()
    prefix_logprobs: tuple[float, ...] = ()
    opening: int | None = None
    later_tokens: int | None = None
    temperature: float | None = None
    watched: bool = False


class NewTokens(NamedTuple):
    """Tokens of a response that is being sampled.

    Attributes:
        first: Position in the response of the first of them.
        token_ids: All tokens from there on.
    """

    first: int
    token_ids: tuple[int, ...]


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
        state.update(repr(request.temperature).encode())
        state.update(struct.pack(f"<{len(ids)}q", *ids))
    return state.digest()
