"""Caps on responses by the lengths of earlier ones: what they cut, and what is said of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rl_run import TableRun, make_run, value
from support.table_engine import TableEngine, response_of

from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.core.types import Completion
from mindspeed_rl.generation.assignment import rebalance_rules
from mindspeed_rl.generation.evaluate import evaluate
from mindspeed_rl.generation.length_caps import LengthCaps, length_caps
from mindspeed_rl.metrics.metric_set import Mean
from mindspeed_rl.rl.advantages import shaped_rewards
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings
from mindspeed_rl.samples.lengths import LengthHistory
from mindspeed_rl.samples.rollout_info import RolloutInfo

FLAGS = (
    "--response-length-cap-factor 1.5 --response-length-cap-floor 2 --grpo-prompts-per-step 12 "
    "--grpo-group-size 1 --rl-advantage-estimator remax "
)


class ObeyingEngine(TableEngine):
    """Its responses end with a stop token, or before it at the limit of their request.

    Attributes:
        wanted: Tokens before the stop token.
    """

    wanted = 3

    def completion(
        self, request: GenerationRequest, settings: SamplingSettings, version: int
    ) -> Completion:
        limit = settings.max_response_tokens if request.max_tokens is None else request.max_tokens
        ids = ((response_of(0)[0],) * self.wanted + (response_of(1)[-1],))[:limit]
        reason = "stop" if len(ids) > self.wanted else "length"
        return Completion(ids, tuple((self.weights[list(ids)]).tolist()), reason, version)


def capped_run(folder: Path, flags: str = "") -> tuple[TableRun, ObeyingEngine]:
    run, engine = make_run(folder, FLAGS + flags), ObeyingEngine()
    run.set_engine(engine)
    return run, engine


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6), st.floats(1.001, 10.0))
def test_a_cap_is_at_most_the_factor_and_between_floor_and_limit(
    longest: int, floor: int, limit: int, factor: float
) -> None:
    caps = LengthCaps(factor, floor, limit)
    cap = caps.cap(longest)
    assert min(floor, limit) <= cap <= limit
    assert cap <= max(floor, factor * longest) and cap > min(limit, factor * longest) - 1
    assert caps.cap(None) == limit
    assert caps.cap(max(cap, longest)) >= cap, "what a cap cut never lowers the next"


def test_the_first_responses_have_no_cap_and_later_ones_that_of_their_prompt(
    tmp_path: Path,
) -> None:
    """Lengths of 4, a limit of 8: caps of 6. Responses of 7 tokens and stop are cut, then are not.

    Greedy ones, which samples are compared with, have the caps as well.
    """
    run, engine = capped_run(tmp_path)
    first = run.generate(1)
    assert all(request.max_tokens == 8 for asked, _ in engine.asked for request in asked)
    assert value(first.metrics, "cap/cut_fraction") == 0
    assert math.isnan(value(first.metrics, "cap/cut_reward"))
    engine.wanted, engine.asked = 7, []
    second = run.generate(2)
    assert len(engine.asked) == 2, "samples and greedy responses"
    assert all(request.max_tokens == 6 for asked, _ in engine.asked for request in asked)
    assert [(s.num_tokens, s.stopped) for s in second.samples] == [(6, False)] * 12
    assert value(second.metrics, "cap/cut_fraction") == 1
    assert value(second.metrics, "cap/limit_fraction") == 0
    engine.asked = []
    third = run.generate(3)
    assert all(request.max_tokens == 8 for asked, _ in engine.asked for request in asked)
    assert all(s.stopped for s in third.samples)


def test_an_evaluation_has_no_cap(tmp_path: Path) -> None:
    run, engine = capped_run(tmp_path)
    run.generate(1)
    engine.asked = []
    run.to_rollout()
    found = evaluate(
        run.parts.rollouts,
        run.parts.scheduler,
        run.config.prompts,
        run.parts.data.train,
        step=1,
        version=run.state.version,
    )
    assert found.num_prompts == 12
    assert all(request.max_tokens is None for asked, _ in engine.asked for request in asked)


def test_without_the_flag_there_are_no_caps(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert length_caps(run.config) is None
    rollouts = run.generate(1)
    assert not any(name.startswith("cap/") for name in rollouts.metrics)
    assert all(request.max_tokens is None for asked, _ in run.engine.asked for request in asked)


def info(prompt: int, tokens: int, stopped: bool, reward: float) -> RolloutInfo:
    return RolloutInfo(0, prompt, tokens, tokens, stopped, 0, 0, reward)


def test_what_caps_cut_by_hand() -> None:
    """Two groups of two and a limit of 20.

    One response of 6 tokens is cut, one reached the limit, and earlier responses of more than 6
    tokens had 9 on average.
    """
    history = LengthHistory()
    history.observe({0: [4, 8], 1: [10, 2]})
    groups = [
        [info(0, 6, False, 0.25), info(0, 3, True, 1.0)],
        [info(1, 20, False, 0.0), info(1, 11, True, 0.5)],
    ]
    found = LengthCaps(1.5, 2, 20).metrics(groups, history)
    assert history.expected(0, 6, 20) == 9
    assert dict(found) == {
        "cap/cut_fraction": Mean(1.0, 4.0),
        "cap/limit_fraction": Mean(1.0, 4.0),
        "cap/cut_groups": Mean(1.0, 2.0),
        "cap/left_out_expected": Mean(3.0, 43.0),
        "cap/left_out_most": Mean(14.0, 54.0),
        "cap/cut_reward": Mean(0.25, 1.0),
    }


def test_a_cut_response_is_punished_and_filtered_as_one_at_the_limit(tmp_path: Path) -> None:
    run, engine = capped_run(
        tmp_path, "--rl-overlong-buffer 1 --rl-overlong-penalty 0.75 --rl-overlong-filtering"
    )
    run.generate(1)
    engine.wanted = 7
    cut = run.generate(2).samples
    assert {s.num_tokens for s in cut} == {6} and not any(s.stopped for s in cut)
    assert shaped_rewards(run.config, cut, 2) == [-0.75] * 12
    assert shaped_rewards(run.config, [replace(cut[0], stopped=True)], 2) == [0.0]
    assert [run.parts.samples.num_trained(s) for s in cut] == [0] * 12


def test_requests_that_may_move_are_expected_to_end_at_their_cap(tmp_path: Path) -> None:
    run = make_run(tmp_path, "--rollout-rebalance all")
    engine = EngineLayout(2, 1)
    plan = replace(run.parts.plan, engine=engine)
    rules = rebalance_rules(run.config, plan, max_num_seqs=16, item_bytes=4)
    assignment = replace(run.parts.rollouts.assignment, engine=engine, rules=rules)
    settings, history = run.parts.rollouts.settings(1.0), LengthHistory()
    history.observe({0: [2], 1: [8]})
    prompts = [run.parts.data.train[i] for i in (0, 1)]
    for limits, wanted in (((), 8), ((8, 6), 6)):
        expected = assignment.expected_lengths(prompts, settings, history, limits=limits)
        found = assignment.rebalancer(expected)
        assert found is not None and found.expected(1, 5) == pytest.approx(wanted)
