"""Runs the environments of many conversations: in this process, or in Ray actors.

A runner gets the turns of several conversations in one call and answers all of them, so that Ray
actors can work on them in parallel. An environment exists as long as its conversation.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.environments.registry import resolve_environment
from mindspeed_rl.environments.types import Environment, EnvironmentFactory, Observation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

START_LIMIT_S = 300.0  # an actor may have to wait for a node


@dataclass(frozen=True, slots=True)
class Failed:
    """The traceback of what an environment raised."""

    trace: str


Answers = dict[int, Observation | Failed]
"""The answer to each conversation that was asked, by its number."""


class LocalRunner:
    """Runs environments in this process, one turn after the other.

    Args:
        factory: Makes the environment of a conversation.
        tokenizer: Tokenizer for the environments.
    """

    def __init__(self, factory: EnvironmentFactory, tokenizer: PreTrainedTokenizerBase) -> None:
        self._factory = factory
        self._tokenizer = tokenizer
        self._environments: dict[int, Environment] = {}

    def reset(self, prompts: Mapping[int, Prompt]) -> Answers:
        """Start conversations in new environments; those of an earlier call have ended."""
        self._environments = {}
        return {i: _guarded(partial(self._reset, i, prompt)) for i, prompt in prompts.items()}

    def _reset(self, number: int, prompt: Prompt) -> Observation:
        environment = self._environments[number] = self._factory(self._tokenizer)
        return environment.reset(prompt)

    def step(self, turns: Mapping[int, tuple[int, ...]]) -> Answers:
        """Return the environments' answers to these turns of the model."""
        return {i: _guarded(partial(self._step, i, turn)) for i, turn in turns.items()}

    def _step(self, number: int, turn: tuple[int, ...]) -> Observation:
        if number not in self._environments:
            raise RuntimeError("the Ray actor that held this conversation was lost")
        return self._environments[number].step(turn)

    def close(self) -> None:
        self._environments = {}


def _guarded(answer: Callable[[], object]) -> Observation | Failed:
    """Turn what the user's code raises into `Failed`: it costs the sample, not the run."""
    try:
        observation = answer()
        if not isinstance(observation, Observation):
            raise TypeError(
                f"an environment must answer with an Observation, not {type(observation).__name__}"
            )
    except Exception:
        return Failed(traceback.format_exc())
    return observation


class _EnvironmentActor(LocalRunner):
    """A `LocalRunner` in a Ray actor, which dies if the environment cannot be loaded."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(resolve_environment(name), tokenizer)


class RayRunner:
    """Runs environments in Ray actors of the cluster that this process is connected to.

    A conversation stays with its actor. When an actor is lost its conversations fail, and another
    actor takes its place for later conversations.

    Args:
        name: Value of ``--rl-environment``; a file must be where every node can read it.
        tokenizer: Tokenizer for every environment.
        num_workers: Number of actors, each of which takes one CPU of the cluster.

    Raises:
        UsageError: the cluster has too few free CPUs, or an environment cannot be loaded.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, num_workers: int) -> None:
        import ray

        self._ray: Any = ray
        self._arguments = (name, ray.put(tokenizer))
        self._actors = [self._start() for _ in range(num_workers)]
        where = f"--rl-environment {name} in {num_workers} Ray actors"
        try:
            ray.get([a.__ray_ready__.remote() for a in self._actors], timeout=START_LIMIT_S)
        except ray.exceptions.GetTimeoutError as error:
            raise UsageError(
                f"{where}: not started after {START_LIMIT_S:.0f} s; the cluster has too few free "
                "CPUs, one is needed for each"
            ) from error
        except ray.exceptions.RayError as error:
            raise UsageError(f"{where}: an actor does not start: {error}") from error

    def _start(self) -> Any:
        # Ray restarts no actor: it would repeat a crash at the start without end.
        actor_type = self._ray.remote(num_cpus=1, max_restarts=0)(_EnvironmentActor)
        return actor_type.remote(*self._arguments)

    def reset(self, prompts: Mapping[int, Prompt]) -> Answers:
        """Start conversations, each in the actor of its number."""
        return self._ask("reset", prompts)

    def step(self, turns: Mapping[int, tuple[int, ...]]) -> Answers:
        """Ask the actors that hold these conversations, all at once."""
        return self._ask("step", turns)

    def _ask(self, method: str, asked: Mapping[int, Any]) -> Answers:
        shares: list[dict[int, Any]] = [{} for _ in self._actors]
        for number, what in asked.items():
            shares[number % len(shares)][number] = what
        calls = {
            position: getattr(self._actors[position], method).remote(share)
            for position, share in enumerate(shares)
            if share
        }
        found: Answers = {}
        for position, call in calls.items():
            try:
                found |= self._ray.get(call)
            except self._ray.exceptions.RayActorError as error:
                found |= dict.fromkeys(shares[position], Failed(f"its Ray actor is lost: {error}"))
                logger.warning("a Ray actor of environments was lost and is replaced: %s", error)
                self._actors[position] = self._start()
        return {number: found[number] for number in asked}

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []


EnvironmentRunner = LocalRunner | RayRunner
"""Holds the environment of each conversation, by the conversation's number."""
