"""The step loop of an engine, in which ranks without requests keep stepping with their peers.

The ranks of an engine with data parallelism exchange tokens in every layer, so all of them must run
the same number of steps; a rank without requests runs a batch of one dummy token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from mindspeed_rl.rollout.engine import Arrivals
from mindspeed_rl.rollout.stats import StepStats

# Steps that a wait for environments counts as, on the way to a rebalance point: others go on.
STEPS_PER_WAIT = 4


class Agreement(Protocol):
    """What the ranks of an engine tell each other in every step."""

    stats: StepStats

    def offer(self, unfinished: int, awaited: int = 0, drafted: int = 0) -> None:
        """Give this rank's numbers, which the next step exchanges."""
        ...

    def finished(self) -> bool:
        """Whether no rank had a request, or awaited one, before the latest step."""
        ...

    @property
    def reads_prompts(self) -> bool:
        """Whether any rank read a prompt in the latest step."""
        ...


def run_steps(
    engine: Any,
    agreement: Agreement | None,
    interval: int,
    stats: StepStats,
    max_steps: int | None = None,
    arrivals: Arrivals | None = None,
    num_drafted: Callable[[], int] | None = None,
) -> Iterator[list[Any]]:
    """Step until no rank of the engine has a request. Collective: the ranks of the engine.

    Args:
        engine: vLLM's ``LLMEngine`` with its requests.
        agreement: Our packed reduction; ``None`` leaves the agreement to the engine.
        interval: With ``agreement``, steps between two checks of whether all ranks are finished.
        stats: Counters to add to; the time that the caller spends between steps is left out.
        max_steps: Number of steps after which to end in any case. With it, requests report every
            token, and decode steps are counted here; without it they report at their end alone.
        arrivals: Requests that the caller adds between steps; while some are awaited no rank ends.
        num_drafted: Returns the drafted tokens that the next step verifies; ``None``: no drafts.

    Yields:
        The outputs of each step: of every request that got a token, or of those that have ended.
    """
    steps = 0
    if agreement is not None:
        agreement.stats = stats
    while max_steps is None or steps < max_steps:
        start = time.perf_counter()
        mine = engine.get_num_unfinished_requests()
        awaited = 0 if arrivals is None else arrivals.num_awaited
        if agreement is not None:
            agreement.offer(mine, awaited, num_drafted() if num_drafted is not None else 0)
            engine.should_execute_dummy_batch = not mine
        elif engine.dp_group is not None:
            if not engine.has_unfinished_requests_dp(bool(mine or awaited)):
                break
            engine.should_execute_dummy_batch = not mine
        elif not mine:
            if not awaited:
                break
            yield []
            steps += STEPS_PER_WAIT if max_steps is not None else 0
            continue
        outputs = engine.step()
        steps += 1
        stats.dummy_steps += not mine
        stats.prompt_steps += agreement is not None and agreement.reads_prompts
        if max_steps is not None and agreement is None:
            # The first token of a response comes from its prefill, which is no decode step.
            stats.running[sum(len(o.outputs[0].token_ids) > 1 for o in outputs)] += 1
        done = agreement is not None and steps % interval == 0 and agreement.finished()
        stats.seconds += time.perf_counter() - start
        yield outputs
        if done:
            break
    stats.steps += steps
    stats.running.pop(0, None)
