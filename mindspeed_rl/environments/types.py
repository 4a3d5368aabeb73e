"""What an environment is: it reads the model's tokens and answers in tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mindspeed_rl.core.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers.

    Attributes:
        token_ids: what the model reads next; never trained on. Empty when the conversation is over.
        done: whether it is over.
        reward: of the conversation so far; the last one that is not ``None`` counts.
    """

    token_ids: tuple[int, ...] = ()
    done: bool = False
    reward: float | None = None


class Environment(Protocol):
    """One conversation. Used by one thread, in the process that leads an engine or in a Ray actor.

    The steps of the engine wait for its answers, so it must answer within milliseconds (side by
    side with others in Ray actors), and it must return: nothing can stop it but the limit of the
    phase, which ends the job. What it raises costs the sample (no reward, not trained on) and is
    counted.
    """

    def reset(self, prompt: Prompt) -> Observation:
        """Begin; the tokens, if any, follow the prompt."""
        ...

    def step(self, token_ids: tuple[int, ...]) -> Observation:
        """Answer a turn of the model, its stop token included.

        Without a stop token the turn was cut at the limit of the response: of the answer to it, as
        of that to the last turn that is allowed, only the reward counts.
        """
        ...


EnvironmentFactory = Callable[["PreTrainedTokenizerBase"], Environment]
"""Makes the environment of one sample."""
