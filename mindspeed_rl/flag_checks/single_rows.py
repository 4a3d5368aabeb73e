"""Checks where models may compute in rows of one sequence each, and beside the engines."""

from __future__ import annotations

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.rl import PASS_FLAGS
from mindspeed_rl.core.errors import refuse
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout


def check_single_rows(config: RLRunConfig, parallel: ParallelLayout, engine: EngineLayout) -> None:
    """Refuse rows of one sequence where the layout makes ranks wait for each other. Pure.

    A data-parallel replica of the trainer computes rows of one sequence for itself: another has
    other numbers of them, or has not begun.

    Args:
        config: Configuration of the run.
        parallel: Training layout.
        engine: Layout of the engines.

    Raises:
        UsageError: The message names the flag, the reason and the fix.
    """
    refuse(
        f"{PASS_FLAGS[name]} {choice}: {reason}; use {PASS_FLAGS[name]} packed"
        for name, choice in config.rl.passes.items()
        if choice != "packed"
        for applies, reason in _reasons(choice, parallel, engine)
        if applies
    )


def _reasons(choice: str, parallel: ParallelLayout, engine: EngineLayout) -> list[tuple[bool, str]]:
    """Return reasons against ``single`` or ``tail``, each with whether it applies. Pure."""
    experts = parallel.ep * parallel.etp
    reasons = [
        (
            parallel.cp > 1,
            f"--context-parallel-size {parallel.cp} divides short rows among ranks",
        ),
        (
            parallel.tp % experts != 0,
            f"the {experts} ranks that share the experts of a layer are of several data-parallel "
            "replicas, which would have to compute together",
        ),
    ]
    if choice == "tail":
        reasons += [
            (
                parallel.dp == 1,
                "one replica of the trainer has all ranks, so it cannot begin before the last "
                "engine is done",
            ),
            (
                engine.num_replicas == 1,
                "one engine has all ranks, so all are done at the same time",
            ),
            (
                parallel.tp % engine.tp != 0,
                f"the ranks of an engine (--rollout-tp {engine.tp}) are of several data-parallel "
                "replicas of the trainer",
            ),
        ]
    return reasons
