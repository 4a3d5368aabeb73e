"""Whether drafts pay is decided by measured seconds: what bad ones cost, and when good ones run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from mindspeed_rl.rollout.draft_costs import (
    DraftController,
    DraftRule,
    Savings,
    StepTime,
    plan_drafts,
    saved_steps,
    step_costs,
)

RULE = DraftRule()
STEP, RESPONSE, TOKEN, SEARCH = 4e-3, 1e-4, 3e-5, 2e-5  # seconds of a made-up engine
RESPONSES = 40


def step_time(responses: int, drafted: int = 0, kept: int = 0, searches: int = 0) -> StepTime:
    search = SEARCH * searches
    seconds = STEP + RESPONSE * responses + TOKEN * drafted + search
    return StepTime(responses, drafted, kept, searches, search, seconds)


def test_costs_are_those_of_the_steps() -> None:
    """Pauses of the process, prompts and searches do not enter into them."""
    plain = [step_time(n, searches=n % 3) for n in range(1, 60)]
    drafted = [step_time(n, drafted=2 * n, kept=n) for n in range(1, 60)]
    pause = replace(step_time(30), seconds=1.0)
    prompt = replace(step_time(30), seconds=0.05, reads_prompt=True)
    found = step_costs([*plain, pause, *drafted, prompt])
    assert found.step == pytest.approx(STEP, rel=1e-6)
    assert found.response == pytest.approx(RESPONSE, rel=1e-6)
    assert found.token == pytest.approx(TOKEN, rel=1e-6)
    assert step_costs(plain).token is None


def test_no_part_of_a_step_is_negative() -> None:
    for slope in (-1e-4, 1.0):
        times = [replace(step_time(n), seconds=5e-3 + slope * (n - 5)) for n in range(5, 9)]
        found = step_costs(times)
        assert found.step >= 0 <= found.response
        assert found.plain(6.5) == pytest.approx(5e-3 + slope * 1.5)


def test_saved_steps_are_those_of_the_batch_and_not_of_its_responses() -> None:
    """Three responses at once; a batch whose slowest response gained nothing has saved nothing."""
    assert saved_steps([10, 20, 30], steps=30, capacity=4) == 0
    assert saved_steps([10, 20, 30], steps=12, capacity=4) == 18
    assert saved_steps([10, 20, 30], steps=25, capacity=1) == 35
    assert saved_steps([10], steps=12, capacity=1) == 0


def test_what_a_kept_token_saves_is_measured() -> None:
    """First all responses are assumed to gain alike; then the steps of calls are known."""
    assert Savings().steps_per_token(40, prior=4) == 1 / 40
    slow = Savings()
    for _ in range(20):
        slow = slow.after(steps=0, kept=4000)
    assert slow.steps_per_token(40, prior=4) < 1e-3
    alone = Savings().after(steps=300, kept=300)
    assert alone.steps_per_token(1, prior=4) == 1.0


@dataclass
class Engine:
    """An engine whose steps take so long by a rule, and the seconds that it takes.

    Attributes:
        acceptance: Tokens of each searched draft of 4 that are kept.
        token: Seconds of a drafted token.
        slowest: Whether kept tokens save no step, because one response never has any.
    """

    acceptance: Callable[[int], int]
    token: float = TOKEN
    slowest: bool = False
    noise: float = 0.0

    def run(self, rule: DraftRule, steps: int, call: int) -> tuple[float, float, list[int]]:
        """Return seconds, those of a run without drafts, and the steps after which it drafted."""
        draw = random.Random(7)
        controller, seconds, plain, drafting = DraftController(rule), 0.0, 0.0, []
        drafted = kept = in_call = 0
        for number in range(steps):
            searches = RESPONSES * controller.seeks()
            base = (STEP + RESPONSE * RESPONSES) * (1 + self.noise * (draw.random() - 0.5))
            time = base + self.token * drafted + SEARCH * searches
            seconds += time
            plain += base + kept * (RESPONSE if self.slowest else RESPONSE + STEP / RESPONSES)
            record = StepTime(RESPONSES, drafted, kept, searches, SEARCH * searches, time)
            if controller.note(record):
                controller.follow(controller.next_plan())
            in_call += kept
            if number % call == call - 1:
                controller.end_call(0 if self.slowest else in_call // RESPONSES, in_call)
                in_call = 0
            if searches:
                drafting.append(number)
            drafted = 4 * searches
            kept = self.acceptance(number) * searches
        return seconds, plain, drafting


@pytest.mark.parametrize("token", [TOKEN, 20 * TOKEN])
@pytest.mark.parametrize("call", [8, 1000])
def test_bad_drafts_cost_at_most_their_allowance(token: float, call: int) -> None:
    """The first ones, of which nothing is known, included; steps are noisy."""
    engine = Engine(lambda _: 0, token=token, noise=0.4)
    seconds, plain, drafting = engine.run(RULE, 4000, call)
    assert drafting, "drafts are tried again and again"
    assert seconds < (1 + RULE.allowed_loss + 0.005) * plain
    assert Engine(lambda _: 0, token=token).run(replace(RULE, allowed_loss=1.0), 4000, call)[0] > (
        1.2 * plain
    )


def test_drafts_that_save_no_step_are_bad_though_they_are_kept() -> None:
    """A batch waits for its slowest response, which is learned from the first calls."""
    engine = Engine(lambda _: 3, token=4 * TOKEN, slowest=True)
    (learned, early), (seconds, plain) = (engine.run(RULE, n, 100)[:2] for n in (2000, 12000))
    assert seconds - learned < (1 + RULE.allowed_loss) * (plain - early)
    assert engine.run(RULE, 12000, 10**6)[0] > 1.5 * plain, "where no call has ended"


def test_good_drafts_run_soon_and_in_nearly_every_step() -> None:
    seconds, plain, drafting = Engine(lambda _: 3, noise=0.4).run(RULE, 2000, 100)
    assert len([n for n in drafting if n >= 200]) >= 0.9 * 1800
    assert seconds < 0.5 * plain


def test_drafts_begin_when_they_pay_and_end_when_they_do_not() -> None:
    """As in a second epoch, and after a change of the task."""
    engine = Engine(lambda n: 3 * (2000 <= n < 4000))
    _, _, drafting = engine.run(RULE, 6000, 100)
    counts = [sum(start <= n < start + 1000 for n in drafting) for start in range(0, 6000, 1000)]
    assert counts[0] < 60 and counts[1] < 60
    assert counts[2] > 500 and counts[3] > 900
    assert counts[5] < 60


def test_nothing_is_drafted_before_a_step_is_measured() -> None:
    few = [step_time(RESPONSES)] * (RULE.least_plain - 1)
    assert plan_drafts(few, Savings(), RULE).steps == 0
    prompts = [replace(step_time(RESPONSES), reads_prompt=True)] * 100
    assert plan_drafts(prompts, Savings(), RULE).steps == 0
    assert plan_drafts([step_time(RESPONSES)] * 100, Savings(), RULE).steps > 0


def test_costs_of_a_plan_are_shares_of_what_a_kept_token_saves() -> None:
    times = [
        *(step_time(n, drafted=n, kept=n // 2, searches=n) for n in range(10, 50)),
        *(step_time(n) for n in range(10, 50)),
    ]
    savings = Savings(steps=50.0, kept=1000.0)
    plan = plan_drafts(times, savings, replace(RULE, prior_savings=0.0))
    value = RESPONSE + STEP * 0.05
    assert plan.token_cost == pytest.approx(TOKEN / value)
    assert plan.search_cost == pytest.approx(SEARCH / value)


def test_a_plan_is_due_once_in_a_period_and_counts_its_steps() -> None:
    controller = DraftController(replace(RULE, period=4, least_plain=1, trial_cost=0.0))
    due = [controller.note(step_time(RESPONSES)) for _ in range(8)]
    assert due == [False, False, False, True] * 2
    assert not controller.seeks()
    assert controller.next_plan().steps == 1, "one where nothing is known"
    controller.note(step_time(RESPONSES, searches=1))
    controller.note(step_time(RESPONSES, drafted=4, kept=4))
    controller.follow(controller.next_plan())
    assert list(itertools.islice(iter(controller.seeks, None), 5)) == [True] * 3 + [False] * 2
