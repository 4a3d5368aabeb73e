"""Watches over the steps of a run that the engine computes what the trainer computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from mindspeed_rl.core.agreement import AgreementBounds

FIRST_STEPS = 5
"""Number of compared steps at the start of a run that later ones are compared with."""
GROWTH = 3.0
"""A run warns of a mean that is this many times that of its first steps."""


def check_difference(where: str, mean: float, bounds: AgreementBounds) -> str:
    """Check that the engine computes what the trainer computes.

    Bit-equal parameters do not prove it: derived tensors (rotary tables, packed experts, absorbed
    projections) may be stale.

    Args:
        where: Where the log-probs were compared, for the message.
        mean: Mean |log p(trainer) - log p(engine)|.
        bounds: Bounds of the run.

    Returns:
        A warning if the difference is more than expected, else an empty string.

    Raises:
        RuntimeError: the difference is above the limit, or no number.
    """
    told = f"{where}: mean |log p(trainer) - log p(engine)| is {mean:.3g}"
    if not mean <= bounds.limit:
        raise RuntimeError(
            f"{told}, above --rl-sync-check-tol {bounds.limit:g}, although the weights are "
            f"proven equal: {_cause(mean, bounds)}"
        )
    if mean <= bounds.expected:
        return ""
    unlike = f"; {unlike_cause(bounds.unlike)}" if bounds.unlike else ""
    return (
        f"{told}; up to {bounds.expected:g} is usual for this precision and model, and above "
        f"{bounds.limit:g} the run ends (docs/mismatch.md){unlike}"
    )


def _cause(mean: float, bounds: AgreementBounds) -> str:
    if not math.isfinite(mean):
        return "trainer or engine computes log-probs that are not finite"
    if bounds.unlike:
        return f"{unlike_cause(bounds.unlike)}; if it is rounding, raise the limit"
    return (
        "the engine computes something else than the trainer; where that is rounding, raise the "
        "limit"
    )


def unlike_cause(unlike: str) -> str:
    """Say what a difference between trainer and engine of unlike precisions may come from.

    Args:
        unlike: Result of :func:`unlike_precisions`, not empty.
    """
    return (
        f"{unlike}, whose rounding differs by itself; give both one precision (--bf16 and "
        "--rollout-dtype) to see what is left"
    )


class EngineAgreement:
    """Compares the mismatch of a run's steps with its bounds and with that of its first steps.

    Args:
        bounds: Bounds of the run.
        first: What :attr:`first` was after the step from which the run goes on.
    """

    def __init__(self, bounds: AgreementBounds, first: Sequence[float] = ()) -> None:
        self._bounds = bounds
        self.first = list(first)
        """The mean of each of the first compared steps; kept in checkpoints."""
        self._warned = False

    def see(self, step: int, mean: float) -> str:
        """Take the mean |log p(trainer) - log p(engine)| of a step with proved weights.

        Returns:
            A warning at the first of some steps in a row that are worth one, else an empty string.

        Raises:
            RuntimeError: the mean is above the limit.
        """
        if math.isinf(self._bounds.limit):  # trainer and engine choose other experts
            return ""
        warning = check_difference(f"step {step}", mean, self._bounds)
        if len(self.first) < FIRST_STEPS:
            self.first.append(mean)
        elif not warning:
            warning = self._growth(step, mean)
        begins = bool(warning) and not self._warned
        self._warned = bool(warning)
        return warning if begins else ""

    def _growth(self, step: int, mean: float) -> str:
        """Return a warning if the mean has grown; below a tenth of what is expected it may."""
        usual = median(self.first)
        if mean <= GROWTH * max(usual, self._bounds.expected / 10):
            return ""
        return (
            f"step {step}: mean |log p(trainer) - log p(engine)| is {mean:.3g}; in the first "
            f"{FIRST_STEPS} compared steps it was {usual:.3g} (docs/mismatch.md)"
        )


def check_mismatch(step: int, mismatch: float, limit: float, unlike: str = "") -> None:
    """Stop the run when the log-probs of trainer and engine differ too much.

    Args:
        step: Number of the step, for the message.
        mismatch: Largest |log p(trainer) - log p(engine)| of the step; minus infinity when the
            step trained on no token, so that there was nothing to compare.
        limit: ``--rl-max-logprob-diff``; 0 lets every finite mismatch pass.
        unlike: In which precisions trainer and engine compute; empty if they are the same.

    Raises:
        RuntimeError: the mismatch is above the limit, or not finite, whatever the limit.
    """
    if mismatch == -math.inf:
        return
    if not math.isfinite(mismatch):
        raise RuntimeError(
            f"step {step}: largest |log p(trainer) - log p(engine)| is {mismatch}: trainer or "
            "engine computes log-probs that are not finite, so nothing it learns can be trusted; "
            "lower --lr or --clip-grad, and look at optimizer/grad_norm of the steps before"
        )
    if limit and not mismatch <= limit:
        cause = unlike_cause(unlike) if unlike else "try --lr 0 first: what remains is not learning"
        raise RuntimeError(
            f"step {step}: largest |log p(trainer) - log p(engine)| is {mismatch:.3g}, above "
            f"--rl-max-logprob-diff {limit:g}; {cause}"
        )
