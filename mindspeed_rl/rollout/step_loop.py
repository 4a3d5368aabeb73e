"""The step loop of an engine: ours, so that ranks without prompts keep stepping with their peers.

The ranks of an engine with data parallelism exchange tokens in every layer, so all of them run the
same number of steps; one that has nothing to do runs a batch of one dummy token.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol


class RankAgreement(Protocol):
    """What the ranks of an engine tell each other in the reduction of a step.

    Attributes:
        seconds: spent in reductions.
        reductions: done so far.
        running: decode steps by the batch of their fullest rank.
    """

    seconds: float
    reductions: int
    running: Counter[int]

    @property
    def reads_prompts(self) -> bool:
        """Whether a rank read a prompt in the last step, for which the others waited."""
        ...

    def offer(self, unfinished: int) -> None:
        """What this rank puts into the next reduction."""
        ...

    def finished(self) -> bool:
        """Whether no rank had a request before the last step; reads the device."""
        ...


@dataclass(slots=True)
class StepStats:
    """What a call of the engine ran on this rank.

    Attributes:
        steps: of the engine, dummy ones included.
        dummy_steps: without a request of this rank.
        seconds: of all of them.
        sync_seconds: of them, waiting for the other ranks to agree; 0 where it is not our code.
        reductions: of that agreement; 0 where it is not our code.
        settle_seconds: of moving requests between engines, waiting for the others included.
        moved: requests that left this rank for another engine.
        moved_tokens: tokens that other engines read again for them, prompts included.
        prompt_steps: in which a rank of the engine read a prompt; 0 where it is not our code.
        running: sequences in a decode step, of the fullest rank where ranks agree -> steps.
    """

    steps: int = 0
    dummy_steps: int = 0
    seconds: float = 0.0
    sync_seconds: float = 0.0
    reductions: int = 0
    settle_seconds: float = 0.0
    moved: int = 0
    moved_tokens: int = 0
    prompt_steps: int = 0
    running: Counter[int] = field(default_factory=Counter)


def run_steps(
    engine: Any,
    agreement: RankAgreement | None,
    interval: int,
    stats: StepStats,
    max_steps: int | None = None,
    follows: bool = True,
) -> Iterator[list[Any]]:
    """Step until no rank of the engine has a request. Collective: the ranks of the engine.

    Args:
        engine: vLLM's ``LLMEngine`` with its requests.
        agreement: our packed reduction; ``None`` leaves it to the engine.
        interval: with ``agreement``, steps between looks at who is done.
        stats: what was run is added to it; without the time that the caller spends between steps.
        max_steps: end after so many in any case.
        follows: requests tell of themselves at every token, else at their end alone; decode steps
            are counted by what they tell.

    Yields:
        The outputs of each step: of every request that got a token, or of those that have ended.
    """
    steps = 0
    waited, reduced = (agreement.seconds, agreement.reductions) if agreement else (0.0, 0)
    ran = agreement.running.copy() if agreement else Counter[int]()
    while max_steps is None or steps < max_steps:
        start = time.perf_counter()
        mine = engine.get_num_unfinished_requests()
        if agreement is None:
            if not engine.has_unfinished_requests():
                break
        else:
            agreement.offer(mine)
            engine.should_execute_dummy_batch = not mine
        outputs = engine.step()
        steps += 1
        stats.dummy_steps += not mine
        stats.prompt_steps += agreement is not None and agreement.reads_prompts
        if follows and agreement is None:
            # the first token of a response comes from reading its prompt
            stats.running[sum(len(o.outputs[0].token_ids) > 1 for o in outputs)] += 1
        done = agreement is not None and steps % interval == 0 and agreement.finished()
        stats.seconds += time.perf_counter() - start
        yield outputs
        if done:
            break
    stats.steps += steps
    stats.running.pop(0, None)
    if agreement is not None:
        stats.sync_seconds += agreement.seconds - waited
        stats.reductions += agreement.reductions - reduced
        stats.running += agreement.running - ran
