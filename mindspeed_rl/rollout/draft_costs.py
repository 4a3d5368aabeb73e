"""Whether drafts pay, by the seconds that an engine's steps took with drafts and without.

Three things are measured. A step without drafts takes a part that every step has and a part for
each response in it; a draft adds the verification of its tokens and, on the host, the search for
it. A kept token saves the part of one response, and a share of the part that every step has: how
many steps a call of the engine saved by its kept tokens is known at its end, from the lengths of
its responses. A batch that waits for its slowest response saves none.

Nothing here changes a token: a plan only says when drafts are sought, and how long they may be.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl.core.graph_sizes import decode_batches


@dataclass(frozen=True, slots=True)
class DraftRule:
    """The settings of drafts, and what they may cost.

    Attributes:
        most: Longest draft, in tokens.
        allowed_loss: Largest share of the seconds of recent steps that drafts may have lost.
        token_cost: Cost of a drafted token while it is not measured, in shares of the seconds
            that a kept token saves.
        trial_cost: Cost of the first step with drafts, in steps, while it is not measured.
        prior: Drafted tokens that a new response is assumed to have had, half of them kept.
        memory: Weight of what is known in what is known after the next draft of a response.
        probe_every: Steps between drafts of one token for a response whose drafts do not pay.
        window: Number of recent steps that are judged.
        period: Steps between two plans; the last of them has no drafts, to measure such steps.
        least_plain: Steps without drafts that must be known before the first draft.
        trials: Number of the newest steps with drafts by which the next ones are foreseen.
        prior_savings: Saved steps that a run is assumed to have had when all responses of a step
            gained alike.
    """

    most: int = 8
    allowed_loss: float = 0.03
    token_cost: float = 0.05
    trial_cost: float = 0.5
    prior: float = 2.0
    memory: float = 0.9
    probe_every: int = 32
    window: int = 512
    period: int = 16
    least_plain: int = 8
    trials: int = 16
    prior_savings: float = 4.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of an engine.

    Attributes:
        responses: Responses that got tokens.
        drafted: Drafted tokens that were verified.
        kept: Those of them that were sampled.
        searches: Drafts that were sought after the step.
        search_seconds: Seconds in which they were.
        seconds: Seconds of the step, the search included.
        reads_prompt: Whether the step read a prompt, so that its seconds say nothing of others.
    """

    responses: int
    drafted: int
    kept: int
    searches: int
    search_seconds: float
    seconds: float
    reads_prompt: bool = False

    @property
    def plain(self) -> bool:
        """Whether the step did nothing but decode without drafts."""
        return not (self.drafted or self.reads_prompt)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The seconds of a decode step.

    Attributes:
        step: Part that every step has.
        response: Part of each response in it.
        token: Further part of each drafted token; ``None`` while there was none.
    """

    step: float
    response: float
    token: float | None

    def plain(self, responses: float) -> float:
        """Return the seconds of a step without drafts."""
        return self.step + self.response * responses


@dataclass(frozen=True, slots=True)
class Savings:
    """What the kept tokens of earlier calls saved.

    Attributes:
        steps: Steps that the engine did not need to make.
        kept: Drafted tokens that were sampled.
    """

    steps: float = 0.0
    kept: float = 0.0

    def after(self, steps: int, kept: int, memory: float = 0.8) -> Savings:
        """Return the savings after another call, beside which older ones count less."""
        return Savings(memory * self.steps + steps, memory * self.kept + kept)

    def steps_per_token(self, responses: float, prior: float) -> float:
        """Return the steps that a kept token saves, in [0, 1].

        Args:
            responses: Responses in a step: while nothing is known, all are assumed to gain alike.
            prior: Weight of that assumption, in saved steps.
        """
        return min(1.0, (self.steps + prior) / (self.kept + prior * max(1.0, responses)))


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What may be drafted until the next plan.

    Attributes:
        steps: Steps after which drafts are sought.
        token_cost: Seconds of a drafted token, in shares of those that a kept token saves.
        search_cost: Seconds of a search for a draft, in the same shares.
    """

    steps: int
    token_cost: float
    search_cost: float


def saved_steps(counts: Sequence[int], steps: int, capacity: int) -> int:
    """Return how many steps fewer an engine made than it needs without drafts. Pure.

    Args:
        counts: Tokens of each response, those of all turns of a conversation together, in the
            order of their start.
        steps: Steps in which responses got tokens.
        capacity: Responses that run at once.
    """
    needed = decode_batches([count + 1 for count in counts], capacity)
    return max(0, needed.total() - steps)


def step_costs(times: Sequence[StepTime]) -> StepCosts:
    """Return the costs of steps by least squares over those without drafts. Pure.

    Steps of more than twice what they should take are left out of it: the process was paused.

    Args:
        times: Steps, of which at least one is plain.
    """
    plain = [(t.responses, t.seconds - t.search_seconds) for t in times if t.plain]
    step, response = _line(plain)
    usual = [(n, seconds) for n, seconds in plain if seconds <= 2 * (step + response * n)]
    if usual:
        step, response = _line(usual)
    verified = [t for t in times if t.drafted and not t.reads_prompt]
    if not verified:
        return StepCosts(step, response, None)
    more = sum(t.seconds - t.search_seconds - step - response * t.responses for t in verified)
    return StepCosts(step, response, max(0.0, more / sum(t.drafted for t in verified)))


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the line through points that fits best with neither part below 0."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = min(max(0.0, slope), mean_y / mean_x if mean_x else 0.0)
    return mean_y - slope * mean_x, slope


def plan_drafts(times: Sequence[StepTime], savings: Savings, rule: DraftRule) -> DraftPlan:
    """Return what may be drafted in the next steps. Pure.

    Drafts that lose are sought in so many steps that the loss of all known ones stays within its
    bound; drafts that gain are sought in all but the last. Where none is known, one is tried.

    Args:
        times: Recent steps, the newest last.
        savings: What kept tokens have saved.
        rule: Bounds, and assumptions where nothing is measured.
    """
    nothing = DraftPlan(0, rule.token_cost, 0.0)
    if sum(t.plain for t in times) < rule.least_plain:
        return nothing
    costs = step_costs(times)
    mean = sum(t.responses for t in times) / len(times)
    share = savings.steps_per_token(mean, rule.prior_savings)
    value = costs.response + costs.step * share  # of a kept token
    if value <= 0.0:
        return nothing
    token = rule.token_cost * value if costs.token is None else costs.token

    def loss(steps: Sequence[StepTime]) -> float:
        spent = sum(t.search_seconds + token * t.drafted for t in steps)
        return spent - value * sum(t.kept for t in steps)

    allowed = rule.allowed_loss * sum(t.seconds for t in times) - loss(times)
    newest = [i for i, t in enumerate(times) if t.searches][-rule.trials :]
    if newest:
        tried = times[newest[0] :]
        per_step = loss(tried) / len(newest)
        search = sum(t.search_seconds for t in tried) / sum(t.searches for t in tried)
        most = rule.period - 1
    else:
        per_step, search = rule.trial_cost * costs.plain(mean), 0.0
        most = 1
    steps = most if per_step <= 0 else max(0, min(most, math.floor(allowed / per_step)))
    return DraftPlan(steps, token / value, search / value)


class DraftController:
    """The plans of an engine, over all its calls. The ranks of an engine have equal plans.

    Args:
        rule: Bounds and assumptions.

    Attributes:
        rule: The same.
        plan: What may be drafted, see :meth:`follow`.
    """

    def __init__(self, rule: DraftRule) -> None:
        self.rule = rule
        self.plan = DraftPlan(0, rule.token_cost, 0.0)
        self._left = 0
        self._noted = 0
        self._savings = Savings()
        self._times: deque[StepTime] = deque(maxlen=rule.window)

    def seeks(self) -> bool:
        """Return whether drafts are sought after this step, which the plan then counts."""
        self._left -= 1
        return self._left >= 0

    def note(self, time: StepTime) -> bool:
        """Add a step, and return whether a new plan is due."""
        self._times.append(time)
        self._noted += 1
        return self._noted % self.rule.period == 0

    def next_plan(self) -> DraftPlan:
        """Return what this rank would plan by its own measurements."""
        return plan_drafts(tuple(self._times), self._savings, self.rule)

    def follow(self, plan: DraftPlan) -> None:
        """Follow a plan, which is that of the first rank of the engine."""
        self.plan, self._left = plan, plan.steps

    def end_call(self, saved: int, kept: int) -> None:
        """Note how many steps the kept tokens of a call have saved."""
        if kept:  # else nothing is learned of what a kept token saves
            self._savings = self._savings.after(saved, kept)
