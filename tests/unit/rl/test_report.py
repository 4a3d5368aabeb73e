"""Evaluation and the report of a run: scores, steps, times, the brake on drift.

A run of one rank with the product's own report, timer, logger, scoring and exchange; the engine
answers from a table.
"""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.rl_run import Answers, answering_run, make_run, state_at

from mindspeed_rl.generation.evaluate import Evaluation, evaluate, is_right
from mindspeed_rl.metrics.agreement import check_mismatch
from mindspeed_rl.metrics.constant_rewards import ConstantRewards, MissingRewards
from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet
from mindspeed_rl.rl.components import Components, RunState
from mindspeed_rl.rl.report import RunReporter, order_lines
from mindspeed_rl.rl.rollouts import generate_rollouts
from mindspeed_rl.samples.store import PlacedSamples


def metrics_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


ROWS = (
    ("42", "stop", "42"),  # to the letter
    (r"so it is \boxed{\frac{1}{2}}", "stop", "0.5"),  # right, and only mathematics can tell
    ("7", "stop", "8"),  # wrong
    ("9", "length", "9"),  # right, but it was cut off
)


def evaluated(run: Components, step: int) -> Evaluation:
    """The result on the only held-out set, by the weights of version 0."""
    dataset, flags = run.data.held_out[""], run.config.prompts
    return evaluate(run.rollouts, run.scheduler, flags, dataset, step=step, version=0)


def test_evaluation_reports_the_reward_of_the_run(tmp_path: Path) -> None:
    run = answering_run(tmp_path, ROWS, ["math=0.9", "format=0.1"])
    result = evaluated(run, 3)
    assert result.reward == pytest.approx((1.0 + 1.0 + 0.1 + 0.9) / 4)
    assert result.accuracy == 1 / 4
    assert result.accuracy_lenient == 3 / 4
    assert (result.num_prompts, result.num_unscored) == (4, 0)
    assert result.metrics()["eval/reward"] == result.reward


def test_without_a_verdict_the_last_number_counts(tmp_path: Path) -> None:
    run = answering_run(tmp_path, ROWS, ["format"])
    result = evaluated(run, 3)
    assert result.reward == 3 / 4
    assert (result.accuracy, result.accuracy_lenient) == (1 / 4, 2 / 4)


def test_an_unscored_response_is_left_out_of_the_mean(tmp_path: Path) -> None:
    run = answering_run(tmp_path, ROWS, ["abstains"])
    result = evaluated(run, 3)
    assert math.isnan(result.reward) and result.num_unscored == 4


def test_every_set_has_its_metrics_and_every_sample_counts_once(tmp_path: Path) -> None:
    """Greedy and three samples per prompt, with seeds of their own."""
    flags = "--rl-eval-samples 3 --rl-eval-temperature 0.7"
    run = answering_run(tmp_path, ROWS, ["math"], flags)
    run.data.held_out["hard"] = cast(Any, run.data.train[2:])
    state = state_at()
    report = RunReporter(run, state)
    report.evaluate_if_due(0)
    (record,) = metrics_of(tmp_path)
    assert record["eval/num_prompts"] == 4 and record["eval/hard/num_prompts"] == 2
    assert record["eval/accuracy_lenient"] == 3 / 4 == record["eval/mean@3"]
    assert record["eval/hard/accuracy_lenient"] == 1 / 2 == record["eval/hard/pass@1"]
    assert record["eval/pass@2"] == record["eval/pass@3"] == 3 / 4
    assert record["eval/hard/sampled_reward"] == record["eval/hard/reward"] == 1 / 2
    asked = cast(Answers, run.rollouts.engine).asked
    assert [len(requests) for requests, _ in asked] == [4, 12, 2, 6]
    assert len({r.seed for r in asked[1][0]}) == 12
    again = RunReporter(
        answering_run(tmp_path, ROWS, ["math"], f"{flags} --load {tmp_path}"),
        state_at(),
        1,
        report.state_dict(),
    )
    assert again.state_dict()["evaluations"] == report.state_dict()["evaluations"]


def test_sampled_evaluations_have_seeds_and_a_temperature_of_their_own(tmp_path: Path) -> None:
    """No sample of an evaluation draws the random numbers of a sample that was trained on."""
    flags = "--rl-eval-samples 2 --rl-eval-temperature 0.6"
    run = answering_run(tmp_path, ROWS, ["math"], flags)
    engine = cast(Answers, run.rollouts.engine)
    for step in (1, 2):
        generate_rollouts(run, state_at(step))
    trained = {r.seed for requests, _ in engine.asked for r in requests}
    for step in (1, 2):
        evaluated(run, step)
    of_evaluations = {r.seed for requests, _ in engine.asked[2:] for r in requests}
    temperatures = [settings.temperature for _, settings in engine.asked]
    assert temperatures == [run.config.rl.rl_default_temperature] * 2 + [0.0, 0.6] * 2
    assert len(trained) == 2 * 4 and len(of_evaluations) >= 2 * 8
    assert not trained & of_evaluations


def test_an_evaluation_in_the_rollouts_of_a_step_has_the_same_results(tmp_path: Path) -> None:
    """One call of the engine has all requests, each with the seed that it has alone.

    Of the four answers the longest has 26 tokens: the evaluation's two passes over two sets take
    as many steps each, and none beside the step's own responses, as the engine has 16 places.
    """
    flags = "--rl-eval-samples 1 --rl-eval-temperature 0.7"
    records, seeds, results = [], [], []
    for more in ("", " --rl-eval-in-rollouts"):
        folder = tmp_path / f"run{len(more)}"
        run = answering_run(folder, ROWS, ["math", "format"], flags + more)
        run.data.held_out["hard"] = cast(Any, run.data.train[2:])
        engine, state = cast(Answers, run.rollouts.engine), state_at(1)
        report = RunReporter(run, state)
        shared = report.evaluate_if_due(0)
        assert (shared is None) == (not more)
        rollouts = generate_rollouts(run, state, shared)
        report.end_evaluation(shared)
        assert report.evaluate_if_due(0) is None, "it has been"
        (record,) = metrics_of(folder)
        records.append(record)
        results.append([(s.prompt_index, s.reward, s.num_tokens) for s in rollouts.samples])
        calls = engine.asked
        degree = {r.seed: r.temperature or s.temperature for asked, s in calls for r in asked
                  if r.temperature != 0.0}  # fmt: skip
        seeds.append((degree, {r.seed for asked, _ in calls for r in asked}))
        assert [len(asked) for asked, _ in calls] == ([16] if more else [4, 4, 2, 2, 4])
    alone, together = records
    longest = max(len(text) + (why == "stop") for text, why, _ in ROWS)
    steps = {name: together.pop(name) for name in ("eval/steps_alone", "eval/steps_added")}
    assert steps == {"eval/steps_alone": 2 * longest + 2 * 2, "eval/steps_added": 0}
    timed = {name for name in alone if name.endswith("time_s")}
    assert len(timed) == 2
    assert {k: v for k, v in alone.items() if k not in timed} == together
    assert results[0] == results[1] and seeds[0][1] == seeds[1][1]
    sampled = {seed for seed, degree in seeds[1][0].items() if degree == 0.7}
    assert sampled == {seed for seed, degree in seeds[0][0].items() if degree == 0.7}
    assert sampled


def test_an_evaluation_runs_alone_where_the_step_generates_nothing(tmp_path: Path) -> None:
    run = answering_run(tmp_path, ROWS, ["math"], "--rl-eval-in-rollouts")
    report = RunReporter(run, state_at())
    shared = report.evaluate_if_due(0)
    assert shared is not None
    report.end_evaluation(shared)
    (record,) = metrics_of(tmp_path)
    assert record["eval/accuracy_lenient"] == 3 / 4 and "eval/steps_alone" not in record
    assert len(cast(Answers, run.rollouts.engine).asked) == 1


def test_partial_rollouts_cut_no_evaluation(tmp_path: Path) -> None:
    run = answering_run(
        tmp_path, ROWS, ["math"], "--partial-rollout-tokens 1 --old-logprob rollout"
    )
    evaluated(run, 3)
    ((requests, settings),) = cast(Answers, run.rollouts.engine).asked
    assert {r.max_tokens for r in requests} == {None} and settings.max_response_tokens == 48


def test_the_first_verdict_that_scored_a_sample_counts() -> None:
    assert is_right({"format": 1.0, "code": 1.0, "math": 0.0}, "7", "8") is False
    assert is_right({"format": 0.0, "code": 1.0, "math": math.nan}, "7", "8") is True
    assert is_right({"format": 0.0, "code": 0.5}, "8", "8") is False
    assert is_right({"format": 0.0, "code": math.nan}, "8", "8") is True


NOWHERE = PlacedSamples([], [], [], cast(Any, None), MetricSet())


def log(run: Components, state: RunState, report: RunReporter, step: int, mismatch: float) -> None:
    state.step = step
    metrics = MetricSet({"mismatch/max_abs_logprob": Max(mismatch)})
    report.log_step(generate_rollouts(run, state), metrics, NOWHERE)


def test_an_evaluation_has_its_own_step_and_no_share_in_the_time(tmp_path: Path) -> None:
    run = answering_run(tmp_path, ROWS, flags="--eval-interval 2 --rl-prompts-per-eval 2")
    state = state_at()
    report = RunReporter(run, state)
    for step in (1, 2):
        report.evaluate_if_due(step - 1)
        log(run, state, report, step, 1e-6)
    report.evaluate_if_due(2)
    records = metrics_of(tmp_path)
    assert [(r["step"], "eval/reward" in r) for r in records] == [
        (0, True), (1, False), (2, False), (2, True),
    ]  # fmt: skip
    assert not any(name.startswith("eval/") for name in records[1])
    for record in (records[1], records[2]):
        assert record["time/step_s"] == record["time/generate_s"] == 2.0
        assert "time/evaluate_s" not in record
    tokens = sum(len(text) + (why == "stop") for text, why, _ in ROWS)
    assert records[1]["throughput/tokens_per_s"] == tokens / 2.0


@pytest.mark.parametrize("tokens", ["", "--log-rollout-tokens"])
def test_rollouts_of_different_prompts_are_dumped(tmp_path: Path, tokens: str) -> None:
    run = answering_run(tmp_path, ROWS, flags=f"--log-rollouts 2 {tokens}")
    state = state_at()
    log(run, state, RunReporter(run, state), 1, 0.0)
    first, second = map(json.loads, (tmp_path / "rollouts.jsonl").read_text().splitlines())
    assert (first["sample_id"], second["sample_id"]) == (0, 2)
    words = {"step": 1, "reward": 1.0, "prompt": "q0", "response": "42\x01", "answer": "42"}
    assert first | words == first
    assert first["finish_reason"] == "stop" and first["parts"] == {"math": 1.0}
    assert second["reward"] == 0.0
    assert ("logprobs" in first) == bool(tokens) and "versions" not in first
    if tokens:
        assert first["prompt_ids"] == [0]
        assert len(first["response_ids"]) == len(first["logprobs"]) == 3


@pytest.mark.parametrize(
    ("limit", "mismatch", "told"),
    [
        ("0", math.nan, r"step 2: .* is nan: trainer or engine computes"),
        ("0.5", 0.6, r"is 0\.6, above --rl-max-logprob-diff 0\.5"),
    ],
)
def test_a_step_with_a_wrong_mismatch_is_logged_and_ends_the_run(
    tmp_path: Path, limit: str, mismatch: float, told: str
) -> None:
    run = answering_run(tmp_path, ROWS, flags=f"--rl-max-logprob-diff {limit}")
    state = state_at()
    report = RunReporter(run, state)
    log(run, state, report, 1, 0.5)
    with pytest.raises(RuntimeError, match=told):
        log(run, state, report, 2, mismatch)
    last = metrics_of(tmp_path)[1]
    worst = report.state_dict()["totals"]["worst_mismatch"]
    if math.isnan(mismatch):
        assert last["nonfinite"] == ["mismatch/max_abs_logprob"] and math.isnan(worst)
    else:
        assert last["mismatch/max_abs_logprob"] == worst == 0.6


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_the_brake_on_drift(limit: float) -> None:
    check_mismatch(3, 0.5 if limit else 100.0, limit)
    check_mismatch(3, -math.inf, limit)  # no token was trained on
    for mismatch in (math.nan, math.inf):
        with pytest.raises(RuntimeError, match="log-probs"):
            check_mismatch(3, mismatch, limit)


def test_a_run_warns_of_rewards_that_never_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the flag, in the run."""
    run = answering_run(tmp_path, ROWS[2:3], flags="--reward-constant-steps 2")
    state = state_at()
    report = RunReporter(run, state)
    for step in (1, 2):
        log(run, state, report, step, 0.0)
    assert capsys.readouterr().out.count("warning: step 2: rewards: in each of the last 2") == 1


def test_the_probe_goes_on_with_the_samples_of_every_step(tmp_path: Path) -> None:
    """Weights derived wrongly after a proof show in what the engine computes."""
    run = answering_run(tmp_path, ROWS, flags="--reshard-verify-interval 0")
    state = state_at()
    report = RunReporter(run, state)
    mismatch = {"mismatch/max_abs_logprob": Max(0.1), "mismatch/mean_abs_logprob": Mean(0.1, 1.0)}
    for step in (2, 3):
        state.step = step
        rollouts = generate_rollouts(run, state)
        with pytest.raises(RuntimeError, match=f"step {step}: mean"):
            report.log_step(rollouts, MetricSet(mismatch), NOWHERE)
    mismatch["mismatch/mean_abs_logprob"] = Mean(0.0, 0.0)  # nothing could be compared
    state.step = 5
    report.log_step(generate_rollouts(run, state), MetricSet(mismatch), NOWHERE)


def test_a_resumed_run_compares_its_engine_with_the_first_steps_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their means are kept with the report; three times as much is worth a warning."""
    run = answering_run(tmp_path, ROWS, flags="--reshard-verify-interval 1 --train-iters 7")
    state = state_at()
    report = RunReporter(run, state)
    for step, mean in enumerate([1.25e-5, 1e-5, 1.5e-5, 1e-5, 1.25e-5, 3.5e-5, 5e-5], 1):
        if step == 7:
            report = RunReporter(run, state, 6, json.loads(json.dumps(report.state_dict())))
        state.step = step
        mismatch = {
            "mismatch/max_abs_logprob": Max(mean), "mismatch/mean_abs_logprob": Mean(mean, 1.0)
        }  # fmt: skip
        report.log_step(generate_rollouts(run, state), MetricSet(mismatch), NOWHERE)
        told = capsys.readouterr().out
        assert ("warning: step 7: mean" in told and "it was 1.25e-05" in told) == (step == 7)


def test_the_summary_says_of_which_run_it_is(tmp_path: Path) -> None:
    run = answering_run(tmp_path, ROWS)
    summary = RunReporter(run, state_at())._summary(None, None)
    assert summary["model"] == run.job.config.model.hf_checkpoint
    assert (summary["algorithm"], summary["ranks"]) == ("reinforce_plus_plus", 1)
    assert datetime.fromisoformat(summary["ended"]).tzinfo is not None


def test_a_fresh_run_replaces_old_results_only_when_told(tmp_path: Path) -> None:
    run = answering_run(tmp_path, ROWS)
    state = state_at()
    log(run, state, RunReporter(run, state), 1, 0.0)
    run.telemetry.logger.close()
    (tmp_path / "summary.json").write_text("{}")
    # --load was given, so that nothing was refused at start, and had no checkpoint
    (tmp_path / "empty").mkdir()
    load = f"--load {tmp_path}/empty"
    with pytest.raises(ValueError, match=r"--load .*empty"):
        RunReporter(answering_run(tmp_path, ROWS, flags=load), state_at())
    assert len(metrics_of(tmp_path)) == 1 and (tmp_path / "summary.json").exists()
    again = answering_run(tmp_path, ROWS, flags="--overwrite-output-dir")
    state = state_at()
    log(again, state, RunReporter(again, state), 1, 0.5)
    assert [r["mismatch/max_abs_logprob"] for r in metrics_of(tmp_path)] == [0.5]
    assert not (tmp_path / "summary.json").exists()


def test_the_seconds_of_a_run_include_those_before_it_was_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("mindspeed_rl.rl.report.time", clock)
    first = RunReporter(answering_run(tmp_path, ROWS), state_at())
    now[0] += 30.0
    state = first.state_dict()
    now[0] += 1000.0  # nothing runs
    run = answering_run(tmp_path, ROWS, flags=f"--load {tmp_path}")
    resumed = RunReporter(run, state_at(), 1, state)
    now[0] += 5.0
    assert resumed.state_dict()["totals"]["wall_s"] == 35.0


def test_a_resumed_run_keeps_the_steps_and_drops_the_old_summary(tmp_path: Path) -> None:
    run = answering_run(tmp_path, ROWS)
    state = state_at()
    report = RunReporter(run, state)
    for step in (1, 2):
        log(run, state, report, step, 0.0)
    run.telemetry.logger.close()
    (tmp_path / "summary.json").write_text("{}")
    again = answering_run(tmp_path, ROWS, flags=f"--load {tmp_path}")
    RunReporter(again, state_at(), 1, report.state_dict())
    assert [r["step"] for r in metrics_of(tmp_path)] == [1]
    assert not (tmp_path / "summary.json").exists()


def test_rewards_that_never_differ_are_told_once() -> None:
    """All one number, or none at all, for some steps in a row."""
    watch = ConstantRewards(3)
    steps = [(1.0, 1.0), (1.0, 1.0), (0.0, 1.0), (0.5, 0.5), (1.0, 1.0), (0.0, 0.0), (0.0, 0.0)]
    told = [watch.see(*step) for step in steps]
    assert [bool(text) for text in told] == [False] * 5 + [True, False]
    assert "in each of the last 3 steps" in told[5] and "every reward is 0." in told[5]
    nothing = ConstantRewards(1).see(math.nan, math.nan)
    assert "no sample has a reward" in nothing
    assert not any(ConstantRewards(0).see(1.0, 1.0) for _ in range(3))


def test_lost_rewards_are_told_in_their_first_step() -> None:
    """Once for each sort, from half of the samples on."""
    watch = MissingRewards()
    shares = [(0.0, 0.0), (0.49, 0.25), (0.5, 0.0), (1.0, 0.75), (1.0, 1.0)]
    told = [watch.see(*step) for step in shares]
    assert [len(lines) for lines in told] == [0, 0, 1, 1, 0]
    assert "50% of the rewards hit --reward-timeout-s" in told[2][0]
    assert "75% of the samples have no reward" in told[3][0]


@pytest.mark.parametrize(("reward", "learns"), [("abstains", False), ("format", True)])
def test_a_run_that_could_not_learn_says_so_at_its_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reward: str,
    learns: bool,
) -> None:
    """Also where it was resumed in between."""
    monkeypatch.setattr("mindspeed_rl.rl.report._checksum", lambda policy: 0.0)
    monkeypatch.setattr("mindspeed_rl.rl.report.export_policy", lambda *_: None)
    monkeypatch.setattr("mindspeed_rl.metrics.curves.plot_run", lambda *_: None)
    run = answering_run(tmp_path, ROWS, [reward], flags=f"--load {tmp_path}")
    state = state_at()
    report = RunReporter(run, state)
    log(run, state, report, 1, 0.0)
    told = capsys.readouterr().out
    assert ("warning: step 1: rewards: 100% of the samples have no reward" in told) is not learns
    report = RunReporter(run, state, 1, json.loads(json.dumps(report.state_dict())))
    run.data.held_out.clear()
    report.finish(run.models)
    last = capsys.readouterr().out.splitlines()[-1]
    assert ("could not learn from its rewards" in last) is not learns


def test_an_order_by_length_says_where_it_begins(tmp_path: Path) -> None:
    """Four steps of two prompts are no second epoch of eight prompts."""
    plain, ordered = (make_run(tmp_path, f).config for f in ("", "--prompt-order by-length"))
    assert order_lines(plain, 7) == []
    (begins,), (never,) = order_lines(ordered, 7), order_lines(ordered, 8)
    assert "--train-iters" in never and "--train-iters" not in begins


@pytest.mark.parametrize("more", ["", "--rl-eval-in-rollouts"])
def test_responses_of_evaluations_are_dumped(tmp_path: Path, more: str) -> None:
    """Of the same two prompts in every pass, of every set; a resumed run makes the last again."""
    run = answering_run(
        tmp_path, ROWS, ["math"], f"--rl-eval-samples 2 --log-rollouts 2 --eval-interval 2 {more}"
    )
    run.data.held_out["hard"] = cast(Any, run.data.train[2:])
    state = state_at()
    report = RunReporter(run, state)

    def evaluate_after(step: int) -> None:
        shared = report.evaluate_if_due(step)
        state.step = step + 1
        if shared is not None:
            generate_rollouts(run, state, shared)
            report.end_evaluation(shared)

    def dumped() -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()
        ]

    evaluate_after(0)
    rows = [(r["step"], r["set"], r["kind"], r["sample_id"], r["group"]) for r in dumped()]
    assert rows == [
        *((0, "eval", "greedy", i, i) for i in (0, 2)),
        *((0, "eval", "sampled", i, i // 2) for i in (0, 1, 4, 5)),
        *((0, "hard", "greedy", i, i) for i in (0, 1)),
        *((0, "hard", "sampled", i, i // 2) for i in (0, 1, 2, 3)),
    ]
    first, second = dumped()[:2]
    assert first["response"] == "42\x01" and first["reward"] == 1.0 and first["length"] == 3
    assert first["parts"] == {"math": 1.0} and second["reward"] == 0.0
    assert (first["prompt"], first["answer"], first["finish_reason"]) == ("q0", "42", "stop")
    saved = json.loads(json.dumps(report.state_dict()))  # before the evaluation of its step
    evaluate_after(2)
    assert len(dumped()) == 24
    report = RunReporter(run, state, 2, saved)
    assert {r["step"] for r in dumped()} == {0}
