"""Runs the environments of many conversations: in this process, or in Ray actors.

A runner is asked for answers of environments and gives each as soon as it is there, so that a slow
environment keeps no other conversation waiting. An environment exists as long as its conversation.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

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


Answer = Observation | Failed


class EnvironmentRunner(Protocol):
    """Holds the environment of each conversation, by the conversation's number."""

    def reset(self, prompts: Mapping[int, Prompt]) -> None:
        """Ask for the openings of conversations; those of an earlier call have ended."""
        ...

    def step(self, turns: Mapping[int, tuple[int, ...]]) -> None:
        """Ask for the answers to turns of the model, each of a conversation that has answered."""
        ...

    def answers(self, wait_s: float) -> dict[int, Answer]:
        """Return the answers that have come since the last call, by conversation.

        Waits up to ``wait_s`` seconds for the first, unless nothing was asked.
        """
        ...

    def close(self) -> None:
        """End all conversations."""
        ...


class _Environments:
    """The environments of conversations that are in this process."""

    def __init__(self, factory: EnvironmentFactory, tokenizer: PreTrainedTokenizerBase) -> None:
        self._factory = factory
        self._tokenizer = tokenizer
        self._environments: dict[int, Environment] = {}

    def forget(self) -> None:
        self._environments = {}

    def reset(self, number: int, prompt: Prompt) -> Answer:
        return _guarded(partial(self._reset, number, prompt))

    def step(self, number: int, turn: tuple[int, ...]) -> Answer:
        return _guarded(partial(self._step, number, turn))

    def _reset(self, number: int, prompt: Prompt) -> Observation:
        environment = self._environments[number] = self._factory(self._tokenizer)
        return environment.reset(prompt)

    def _step(self, number: int, turn: tuple[int, ...]) -> Observation:
        if number not in self._environments:
            raise RuntimeError("the Ray actor that held this conversation was lost")
        return self._environments[number].step(turn)


def _guarded(answer: Callable[[], object]) -> Answer:
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


class LocalRunner:
    """Runs environments in threads of this process.

    Args:
        factory: Makes the environment of a conversation.
        tokenizer: Tokenizer for the environments.
        num_threads: Number of environments that answer side by side; 0: each answers when it is
            asked, while the caller waits.
    """

    def __init__(
        self, factory: EnvironmentFactory, tokenizer: PreTrainedTokenizerBase, num_threads: int
    ) -> None:
        self._environments = _Environments(factory, tokenizer)
        self._threads = ThreadPoolExecutor(num_threads) if num_threads else None
        self._asked: dict[Future[Answer], int] = {}

    def reset(self, prompts: Mapping[int, Prompt]) -> None:
        self._environments.forget()
        for number, prompt in prompts.items():
            self._ask(number, partial(self._environments.reset, number, prompt))

    def step(self, turns: Mapping[int, tuple[int, ...]]) -> None:
        for number, turn in turns.items():
            self._ask(number, partial(self._environments.step, number, turn))

    def _ask(self, number: int, answer: Callable[[], Answer]) -> None:
        if self._threads is not None:
            self._asked[self._threads.submit(answer)] = number
            return
        answered: Future[Answer] = Future()
        answered.set_result(answer())
        self._asked[answered] = number

    def answers(self, wait_s: float) -> dict[int, Answer]:
        done = wait(self._asked, wait_s, return_when=FIRST_COMPLETED).done
        # in the order that was asked
        return {self._asked.pop(a): a.result() for a in list(self._asked) if a in done}

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._environments.forget()


class _EnvironmentActor(_Environments):
    """Environments in a Ray actor, which dies if the environment cannot be loaded."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(resolve_environment(name), tokenizer)


class RayRunner:
    """Runs environments in Ray actors of the cluster that this process is connected to.

    A conversation stays with its actor, which answers one after the other. When an actor is lost
    its conversations fail, and another actor takes its place for later conversations.

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
        self._asked: dict[Any, tuple[int, Any]] = {}  # pending call -> conversation and actor
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

    def reset(self, prompts: Mapping[int, Prompt]) -> None:
        for actor in self._actors:
            actor.forget.remote()
        self._ask("reset", prompts)

    def step(self, turns: Mapping[int, tuple[int, ...]]) -> None:
        self._ask("step", turns)

    def _ask(self, method: str, asked: Mapping[int, Any]) -> None:
        for number, what in asked.items():
            actor = self._actors[number % len(self._actors)]
            self._asked[getattr(actor, method).remote(number, what)] = number, actor

    def answers(self, wait_s: float) -> dict[int, Answer]:
        if not self._asked:
            return {}
        calls = list(self._asked)
        ready = self._ray.wait(calls, timeout=wait_s)[0]
        if ready:  # and whatever else has come
            ready = self._ray.wait(calls, num_returns=len(calls), timeout=0)[0]
        return dict(self._answers(ready))

    def _answers(self, calls: Iterable[Any]) -> Iterable[tuple[int, Answer]]:
        for call in calls:
            number, actor = self._asked.pop(call)
            try:
                yield number, self._ray.get(call)
            except self._ray.exceptions.RayActorError as error:
                yield number, Failed(f"its Ray actor is lost: {error}")
                self._replace(actor, error)

    def _replace(self, lost: Any, error: Exception) -> None:
        if lost in self._actors:  # the first of its conversations to fail
            logger.warning("a Ray actor of environments was lost and is replaced: %s", error)
            self._actors[self._actors.index(lost)] = self._start()

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
