"""The step loop of an engine: ours, so that ranks without prompts keep stepping with their peers.

The ranks of an engine with data parallelism exchange tokens in every layer, so all of them run the
same number of steps; one that has nothing to do runs a batch of one dummy token (R29).
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from mindspeed_rl.rollout.graph_sizes import decode_batches


class RankAgreement(Protocol):
    """What the ranks of an engine tell each other in the reduction of a step."""

    seconds: float
    reductions: int

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
        running: sequences in a decode step -> steps.
    """

    steps: int = 0
    dummy_steps: int = 0
    seconds: float = 0.0
    sync_seconds: float = 0.0
    reductions: int = 0
    running: Counter[int] = field(default_factory=Counter)

    @property
    def ms_per_step(self) -> float:
        """Milliseconds; 0 without a step."""
        return 1e3 * self.seconds / self.steps if self.steps else 0.0

    def add(self, other: StepStats) -> None:
        """Take another call in."""
        self.steps += other.steps
        self.dummy_steps += other.dummy_steps
        self.seconds += other.seconds
        self.sync_seconds += other.sync_seconds
        self.reductions += other.reductions
        self.running += other.running


def run_steps(
    engine: Any, agreement: RankAgreement | None, interval: int, max_num_seqs: int
) -> tuple[dict[int, Any], StepStats]:
    """Step until no rank of the engine has a request. Collective: the ranks of the engine.

    Args:
        engine: vLLM's ``LLMEngine`` with its requests.
        agreement: our packed reduction; ``None`` leaves it to the engine.
        interval: with ``agreement``, steps between looks at who is done.
        max_num_seqs: sequences that run at once on a rank.

    Returns:
        Finished requests by their number, and what was run.
    """
    finished: dict[int, Any] = {}
    stats, start = StepStats(), time.perf_counter()
    waited, reduced = (agreement.seconds, agreement.reductions) if agreement else (0.0, 0)
    while True:
        mine = engine.get_num_unfinished_requests()
        if agreement is None:
            if not engine.has_unfinished_requests():
                break
        else:
            agreement.offer(mine)
            engine.should_execute_dummy_batch = not mine
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = output
        stats.steps += 1
        stats.dummy_steps += not mine
        if agreement is not None and stats.steps % interval == 0 and agreement.finished():
            break
    stats.seconds = time.perf_counter() - start
    if agreement is not None:
        stats.sync_seconds = agreement.seconds - waited
        stats.reductions = agreement.reductions - reduced
    lengths = [len(finished[key].outputs[0].token_ids) for key in sorted(finished)]
    stats.running = decode_batches(lengths, max_num_seqs)
    return finished, stats
