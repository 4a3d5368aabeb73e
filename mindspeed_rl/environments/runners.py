"""Runs the environments of many conversations: in this process, or in Ray actors.

A runner takes the turns of several conversations at once and answers all of them, so that one
elsewhere can work on them side by side. Environments come and go with their conversations.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.environments.registry import resolve_environment
from mindspeed_rl.environments.types import Environment, EnvironmentFactory, Observation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START_LIMIT_S = 300.0  # an actor may have to wait for a node


@dataclass(frozen=True, slots=True)
class Failed:
    """What an environment raised, as text."""

    trace: str


Answers = dict[int, Observation | Failed]
"""By conversation; one for each that was asked."""


class EnvironmentRunner(Protocol):
    """Holds the environment of each conversation, by the conversation's number."""

    def reset(self, prompts: Mapping[int, Prompt]) -> Answers:
        """Begin conversations; those of an earlier call are over."""
        ...

    def step(self, turns: Mapping[int, tuple[int, ...]]) -> Answers:
        """Let environments answer these turns of the model."""
        ...


class LocalRunner:
    """Runs environments in this process, one turn after the other.

    Args:
        factory: makes one.
        tokenizer: handed to it.
    """

    def __init__(self, factory: EnvironmentFactory, tokenizer: PreTrainedTokenizerBase) -> None:
        self._factory = factory
        self._tokenizer = tokenizer
        self._environments: dict[int, Environment] = {}

    def reset(self, prompts: Mapping[int, Prompt]) -> Answers:
        """Make a new environment for each prompt, and begin."""
        self._environments = {}
        return {i: _guarded(partial(self._reset, i, prompt)) for i, prompt in prompts.items()}

    def _reset(self, number: int, prompt: Prompt) -> Observation:
        environment = self._environments[number] = self._factory(self._tokenizer)
        return environment.reset(prompt)

    def step(self, turns: Mapping[int, tuple[int, ...]]) -> Answers:
        """Let the environments of these conversations answer."""
        return {i: _guarded(partial(self._environments[i].step, turn)) for i, turn in turns.items()}


def _guarded(answer: Callable[[], object]) -> Observation | Failed:
    """What the user's code raises costs the sample, not the run."""
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
    """A `LocalRunner` in a Ray actor; it ends where the environment cannot be loaded."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(resolve_environment(name), tokenizer)

    def is_ready(self) -> bool:
        """Answers when the environment is loaded."""
        return True


class RayRunner:
    """Runs environments in Ray actors of the cluster that this process is connected to.

    A conversation stays with its actor. The conversations of an actor that is lost have failed, and
    another actor takes its place for later ones.

    Args:
        name: ``--rl-environment``; a file must be where every node can read it.
        tokenizer: handed to every environment.
        num_workers: actors, each takes one CPU of the cluster.

    Raises:
        UsageError: the cluster has no room, or an environment cannot be loaded.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, num_workers: int) -> None:
        import ray

        self._ray: Any = ray
        self._arguments = (name, ray.put(tokenizer))
        self._actors = [self._start() for _ in range(num_workers)]
        where = f"--rl-environment {name} in {num_workers} Ray actors"
        try:
            ray.get([a.is_ready.remote() for a in self._actors], timeout=START_LIMIT_S)
        except ray.exceptions.GetTimeoutError as error:
            raise UsageError(
                f"{where}: not started after {START_LIMIT_S:.0f} s; the cluster has too few free "
                "CPUs, one is needed for each"
            ) from error
        except ray.exceptions.RayError as error:
            raise UsageError(f"{where}: an actor does not start: {error}") from error

    def _start(self) -> Any:
        return self._ray.remote(num_cpus=1, max_restarts=0)(_EnvironmentActor).remote(
            *self._arguments
        )

    def reset(self, prompts: Mapping[int, Prompt]) -> Answers:
        """Begin conversations, each in the actor of its number."""
        return self._ask("reset", prompts)

    def step(self, turns: Mapping[int, tuple[int, ...]]) -> Answers:
        """Ask the actors that hold these conversations, side by side."""
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
                self._actors[position] = self._start()
        return {number: found[number] for number in asked}

    def close(self) -> None:
        """Kill the actors."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
