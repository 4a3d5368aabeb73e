"""The protocol of environments, which read the model's tokens and answer in tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from mindspeed_rl.core.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Watch: TypeAlias = Callable[[int, tuple[int, ...]], None]


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer of an environment.

    Attributes:
        token_ids: What the model reads next; never trained on. Empty at the end of a conversation.
        done: Whether the conversation is over.
        reward: Reward of the conversation so far; the last one that is not ``None`` counts.
        behind: Turn of the model behind which the tokens stand, counted from 1 in the order of
            generation; 0: the prompt; ``None``: the last turn. With an earlier one the conversation
            branches there; what is trained on at the end is the branch of the last turn.
        max_tokens: Largest number of tokens of the next turn; ``None``: what the limit of the
            conversation leaves.
        cut: With ``done``: whether it ended at a limit, as a response that is cut.
        watch: Gets tokens of the next turn while it is sampled, in the thread of the engine: the
            position of the first of them in the turn, and all from there on. A turn that moves to
            another engine is not followed there. ``None``: nobody waits for a part of a turn.
    """

    token_ids: tuple[int, ...] = ()
    done: bool = False
    reward: float | None = None
    behind: int | None = None
    max_tokens: int | None = None
    cut: bool = False
    watch: Watch | None = field(default=None, compare=False)


class Environment(Protocol):
    """One conversation, in a thread of the process that leads an engine or in a Ray actor.

    It is asked once at a time, though not always by the same thread. While it answers, the engine
    generates for other conversations; what it computes in Python takes time from the engine, in an
    actor it does not. It must return: only the time limit of the phase stops it, and that ends the
    job. An exception costs the sample (no reward, not trained on) and is counted.
    """

    def reset(self, prompt: Prompt) -> Observation:
        """Start the conversation; the tokens of the observation, if any, follow the prompt."""
        ...

    def step(self, token_ids: tuple[int, ...]) -> Observation:
        """Answer a turn of the model, its stop token included.

        Without a stop token the turn was cut off at the limit of the response. Of the answer to it,
        and to the last turn that is allowed, only the reward counts.
        """
        ...


EnvironmentFactory = Callable[["PreTrainedTokenizerBase"], Environment]
"""Makes the environment of one sample."""
