"""The wiring of an RL step, number by number, on a policy whose log-probs are a table.

Six samples: two prompts, three samples each. Sample ``i`` answers with 1 + i % 3 times token 4 + i,
the odd ones with the stop token behind it, so every gradient has a closed form and a sample that is
lost, moved or given another's advantage changes an entry of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.rl_run import COUNTS, PROMPTS, TableRun, by_sample, make_run, response, value
from support.scoring import Batch
from support.table_engine import STOP, VOCAB, first_table, response_of

from mindspeed_rl.algorithms.types import Denominators
from mindspeed_rl.colocation.scheduler import Phase
from mindspeed_rl.metrics.metric_set import Mean
from mindspeed_rl.rewards import RewardRequest
from mindspeed_rl.rl.sync import check_engine
from mindspeed_rl.rl.update import FIRST_RATIO, RATIO
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey
from mindspeed_rl.samples.sample_metrics import sample_metrics

REWARDS: dict[int, float | None] = dict(enumerate((1.0, 0.0, 0.0, 1.0, 1.0, 0.0)))
# (1/3) / (standard deviation of (1, 0, 0) + 1e-4)
UNIT = (1 / 3) / (math.sqrt(1 / 3) + 1e-4)
ADVANTAGES = [2 * UNIT, -UNIT, -UNIT, UNIT, UNIT, -2 * UNIT]
NUM_TOKENS = 15


def entries(values: dict[int, float]) -> torch.Tensor:
    """A table that is 0 elsewhere."""
    table = torch.zeros(VOCAB)
    for token, entry in values.items():
        table[token] = entry
    return table


def own_gradient(samples: range, num_tokens: int) -> dict[int, float]:
    """-A n / N at the samples' own tokens."""
    return {4 + i: -ADVANTAGES[i] * (1 + i % 3) / num_tokens for i in samples}


def sample(i: int, reward: float = 0.0, ids: tuple[int, ...] | None = None) -> RolloutInfo:
    ids = response_of(i) if ids is None else ids
    prompt, stopped, key = i // 3 % len(PROMPTS), ids[-1:] == (STOP,), SampleKey(0, i)
    return RolloutInfo(i, prompt, len(ids), len(ids), stopped, 0, 0, reward, (reward,), key=key)


def hold(run: TableRun, samples: list[RolloutInfo]) -> list[RolloutInfo]:
    """The run keeps what these samples say."""
    ids = [response_of(s.sample_id)[: s.num_tokens] for s in samples]
    return run.hold(samples, [response(i, first_table()[list(i)]) for i in ids])


# --- rollouts and rewards ----------------------------------------------------------------------


def test_collect_gives_every_sample_with_its_prompt_and_reward(tmp_path: Path) -> None:
    rewards = REWARDS | {4: None}
    run = make_run(tmp_path, rewards=rewards)
    expected = type(run.state.sampler)(len(PROMPTS), run.config.train.seed).next(2)
    result = run.generate()
    assert [s.sample_id for s in result.samples] == list(range(6))
    for i, s in enumerate(result.samples):
        assert s.prompt_index == expected[i // 3]
        assert (s.num_tokens, s.num_sampled, s.group) == (COUNTS[i], COUNTS[i], 0)
        assert (s.stopped, s.weights_version, s.key) == (i % 2 == 1, 0, SampleKey(1, i))
        if i == 4:
            assert math.isnan(s.reward) and math.isnan(s.parts[0])
        else:
            assert (s.reward, s.parts) == (rewards[i], (rewards[i],))
    for i, found in enumerate(run.said(result.samples)):
        assert tuple(found["token_ids"].tolist()) == response_of(i)
        logprobs = first_table()[found["token_ids"]]
        torch.testing.assert_close(found["rollout_logprobs"], logprobs, rtol=0, atol=0)
        assert "loss_mask" not in found
    asked, _ = run.engine.asked[0]
    assert [r.token_ids for r in asked] == [PROMPTS[expected[i // 3]].token_ids for i in range(6)]
    assert len({r.seed for r in asked}) == 6


def test_rewards_read_the_text_without_special_tokens(tmp_path: Path) -> None:
    run = make_run(tmp_path, rewards=REWARDS)
    samples = run.generate().samples
    requests = run.pool.requests
    for i, (request, s) in enumerate(zip(requests, samples, strict=True)):
        prompt = PROMPTS[s.prompt_index]
        assert request.response == chr(4 + i) * (1 + i % 3)
        assert (request.prompt, request.answer) == (prompt.text, prompt.answer)
        assert request.finish_reason == ("stop" if i % 2 else "length")
        assert request.num_response_tokens == COUNTS[i]


def test_ranks_without_rewards_report_the_same_names(tmp_path: Path) -> None:
    run = make_run(tmp_path, rewards=REWARDS)
    functions = run.parts.rollouts.rewards
    with functions.scorer() as scorer:
        _, metrics = scorer.finish()
    with replace(functions, pool=None).scorer() as scorer:
        scored, silent = scorer.finish()
    assert (scored, silent.keys()) == ([], metrics.keys())
    assert all(metric == Mean(0, 0) for metric in silent.values())


def test_finished_samples_are_scored_while_others_are_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of the engine hands over what it finished, and the rewards begin with it."""
    run = make_run(tmp_path, rewards=REWARDS)
    at_step, add = list[int](), Batch.add

    def noted(batch: Batch, request: RewardRequest) -> None:
        at_step.append(len(run.engine.steps))
        add(batch, request)

    monkeypatch.setattr(Batch, "add", noted)
    run.generate()
    steps = run.engine.steps
    assert len(steps) == 4 and sum(len(done) > 0 for done in steps) > 1, steps
    counts = [sum(map(len, steps[: n + 1])) for n in range(len(steps))]
    assert at_step == [1 + sum(count <= i for count in counts) for i in range(6)]


def test_rewards_and_lengths_of_a_step(tmp_path: Path) -> None:
    samples = [sample(i, r) for i, r in enumerate((1.0, math.nan, 0.0, 0.5, 0.5, 0.5))]
    assert sample_metrics(samples, ("format",), 3) == {
        "reward/mean": 0.5,
        "reward/std": math.sqrt(0.1),
        "reward/group_std": 0.25,  # of 1 and 0, and of three that are equal
        "reward/max": 1.0,
        "reward/min": 0.0,
        "reward/abstained": 1.0,
        "reward/p10": 0.0,
        "reward/p50": 0.5,
        "reward/p90": 1.0,
        "response/length_p10": 1.0,
        "response/length_p50": 2.0,
        "response/length_p90": 4.0,
        "response/length_min": 1.0,
        "reward/format": 0.5,
        "reward/degenerate_groups": 0.5,
        "response/length_mean": NUM_TOKENS / 6,
        "response/length_max": 4.0,
        "response/truncated_fraction": 0.5,
    }


def test_lengths_count_what_the_model_sampled() -> None:
    """In a conversation an environment wrote the rest."""
    samples = [replace(sample(i), num_tokens=40 + i, num_sampled=3 + i) for i in range(3)]
    values = sample_metrics(samples, ("format",), 3)
    names = ("mean", "min", "max", "p50")
    assert [values[f"response/length_{name}"] for name in names] == [4.0, 3.0, 5.0, 4.0]


def test_where_every_sample_abstains_rewards_have_no_mean() -> None:
    values = sample_metrics([sample(i, math.nan) for i in range(3)], ("format",), 3)
    rewards = ("mean", "std", "min", "max", "p50", "format")
    assert all(math.isnan(values[f"reward/{name}"]) for name in rewards)
    assert values["reward/abstained"] == 3.0


# --- advantages --------------------------------------------------------------------------------


def advantages(run: TableRun, rewards: list[float], step: int = 1) -> list[float]:
    """Of each sample, which all of its tokens must share."""
    batches = run.prepared(hold(run, [sample(i, r) for i, r in enumerate(rewards)]), step)
    found = [set(tokens) for tokens in by_sample(batches, "advantages", len(rewards))]
    assert all(len(values) == 1 for values in found)
    return [values.pop() for values in found]


def test_advantages_are_relative_to_the_own_group(tmp_path: Path) -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    run = make_run(tmp_path)
    assert advantages(run, rewards) == pytest.approx(ADVANTAGES)
    undivided = make_run(tmp_path, "--grpo-no-std-normalization")
    thirds = [2 / 3, -1 / 3, -1 / 3, 1 / 3, 1 / 3, -2 / 3]
    assert advantages(undivided, rewards) == pytest.approx(thirds)
    assert advantages(undivided, [1.0, math.nan, 0.0, 7.0, 7.0, 7.0]) == [0.5, 0, -0.5, 0, 0, 0]


def test_an_infinite_reward_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"advantages.*\[3, 4, 5\]"):
        advantages(make_run(tmp_path), [1.0, 0.0, 0.0, math.inf, 1.0, 0.0])


def test_shuffled_rewards_are_the_same_rewards_at_other_samples(tmp_path: Path) -> None:
    """The control keeps the distribution and breaks the link to the samples, anew in every step."""
    flags = "--grpo-group-size 48 --grpo-prompts-per-step 1 --grpo-no-std-normalization"
    control = make_run(tmp_path, f"{flags} --rl-control shuffled-rewards")
    rewards = [float(i) for i in range(48)]
    plain = advantages(make_run(tmp_path, flags), rewards)
    first, again, second = (advantages(control, rewards, step) for step in (1, 1, 2))
    assert plain == [r - 23.5 for r in rewards]
    assert sorted(first) == sorted(second) == plain
    assert first == again, "all ranks must shuffle alike"
    pairs = ((first, plain), (second, plain), (first, second))
    spread = sum(a * a for a in plain)
    for left, right in pairs:
        assert abs(sum(a * b for a, b in zip(left, right, strict=True))) < 0.4 * spread


# --- batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("per_update", [6, 3, 2])
def test_every_token_is_trained_once_with_its_samples_advantage(
    tmp_path: Path, per_update: int
) -> None:
    run = make_run(tmp_path, f"--global-batch-size {per_update}", REWARDS)
    samples = run.generate().samples
    batches = run.prepared(samples)
    assert len(batches.updates) == 6 // per_update
    for number, batch in enumerate(batches.updates):
        ids = range(number * per_update, (number + 1) * per_update)
        assert batch.denominators == Denominators(sum(COUNTS[i] for i in ids), per_update)
        micro = batch.micro_batches
        order = [i for m in micro for i in m.sample_ids]
        assert sorted(order) == list(ids)
        trained = torch.cat([m.targets[m.loss_mask] for m in micro])
        assert trained.tolist() == [t for i in order for t in response_of(i)]
        torch.testing.assert_close(
            torch.cat([m.column("advantages") for m in micro]),
            torch.tensor([ADVANTAGES[i] for i in order for _ in range(COUNTS[i])]),
        )
        logprobs = torch.cat([m.column("rollout_logprobs") for m in micro])
        torch.testing.assert_close(logprobs, first_table()[trained], rtol=0, atol=0)


# --- old and reference log-probs ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "num_passes", "has_old"),
    [
        ("", 0, [False]),
        ("--global-batch-size 2", 2, [False, True, True]),
        ("--grpo-iterations 2", 1, [True]),
        ("--old-logprob recompute", 1, [True]),
        ("--old-logprob recompute --global-batch-size 3", 2, [True, True]),
        ("--old-logprob rollout --global-batch-size 3", 0, [True, True]),
    ],
)
def test_old_logprobs_are_computed_where_no_pass_has_them(
    tmp_path: Path, flags: str, num_passes: int, has_old: list[bool]
) -> None:
    run = make_run(tmp_path, flags, REWARDS)
    run.engine.stale = 0.125
    batches = run.batches()
    assert run.policy.num_passes == num_passes
    updates = batches.updates
    found = [["old_logprobs" in m.columns for m in b.micro_batches] for b in updates]
    assert found == [[old] * len(b.micro_batches) for old, b in zip(has_old, updates, strict=True)]
    assert value(batches.metrics, "forward/old") == num_passes
    shift = 0.125 if "rollout" in flags else 0.0
    for m in batches.micro_batches:
        if "old_logprobs" in m.columns:
            targets = m.targets[m.loss_mask]
            torch.testing.assert_close(m.column("old_logprobs"), first_table()[targets] + shift)
        assert "ref_logprobs" not in m.columns


def test_on_policy_samples_must_come_from_the_present_weights(tmp_path: Path) -> None:
    run = make_run(tmp_path, "", REWARDS)
    samples = run.generate().samples
    batches = run.build(samples)
    samples[2] = replace(samples[2], weights_version=3)
    with pytest.raises(RuntimeError, match=r"\[2\]"):
        run.logprobs(batches, samples)
    other = make_run(tmp_path, "--old-logprob recompute", REWARDS)
    other.logprobs(batches, samples)


# --- updates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["on-policy", "recompute"])
def test_gradient_of_one_step_in_closed_form(tmp_path: Path, choice: str) -> None:
    """-A_i / N at each token of sample i, N over the whole batch; the ratio is 1."""
    run = make_run(tmp_path, f"--old-logprob {choice}", REWARDS)
    metrics = run.update(run.batches())
    stops = sum(ADVANTAGES[i] for i in (1, 3, 5))
    expected = entries(own_gradient(range(6), NUM_TOKENS) | {STOP: -stops / NUM_TOKENS})
    (found,) = run.policy.gradients
    torch.testing.assert_close(found, expected)
    assert run.state.version == 1
    total = sum(a * n for a, n in zip(ADVANTAGES, COUNTS, strict=True))
    assert value(metrics, "loss/policy") == pytest.approx(-total / NUM_TOKENS)
    assert value(metrics, "optimizer/grad_norm") == pytest.approx(float(expected.norm()))
    zero = ("policy/clip_fraction", RATIO, FIRST_RATIO, "optimizer/skipped",
            "mismatch/max_abs_logprob", "mismatch/mean_abs_logprob", "mismatch/k3")  # fmt: skip
    assert {name: value(metrics, name) for name in zero} == dict.fromkeys(zero, 0.0)


def test_later_updates_are_weighted_by_the_ratio_to_the_sampling_weights(tmp_path: Path) -> None:
    """Two updates of a group each; only the stop token is in both, so only its ratio is not 1."""
    run = make_run(tmp_path, "--global-batch-size 3 --grpo-kl-beta 0.1", REWARDS)
    metrics = run.update(run.batches())
    first, second = run.policy.gradients
    torch.testing.assert_close(
        first, entries(own_gradient(range(3), 7) | {STOP: -ADVANTAGES[1] / 7})
    )
    moved = ADVANTAGES[1] / 7  # of log p(stop)
    ratio, kl = math.exp(moved), math.exp(-moved) + moved - 1
    slope = 0.1 * 2 * (1 - math.exp(-moved)) / 8  # of the KL term, at two stop tokens
    stop = -(ADVANTAGES[3] + ADVANTAGES[5]) * ratio / 8 + slope
    torch.testing.assert_close(second, entries(own_gradient(range(3, 6), 8) | {STOP: stop}))
    assert value(metrics, RATIO) == pytest.approx(1 - ratio)
    assert value(metrics, FIRST_RATIO) == 0.0, "the weights are those that sampled"
    assert value(metrics, "loss/kl") == pytest.approx(2 * kl / NUM_TOKENS, rel=1e-4)
    assert run.state.version == 2


def test_iterations_repeat_the_same_batch_against_the_same_old_logprobs(tmp_path: Path) -> None:
    unclipped = "--grpo-clamp-eps-lower 0.9 --grpo-clamp-eps-upper 0.8"
    run = make_run(tmp_path, f"--grpo-iterations 2 {unclipped}", REWARDS)
    run.update(run.batches())
    first, second = run.policy.gradients
    torch.testing.assert_close(second, first * (-first).exp())
    assert run.state.version == 2


@pytest.mark.parametrize(("ratio", "clipped"), [(1.17, 0.0), (1.3, 1.0), (0.95, 0.0), (0.85, 1.0)])
def test_each_clip_flag_bounds_its_own_side(tmp_path: Path, ratio: float, clipped: float) -> None:
    """Ratios up to 1.25 and down to 0.9 are within the bounds."""
    flags = "--old-logprob rollout --grpo-clamp-eps-lower 0.1 --grpo-clamp-eps-upper 0.25"
    run = make_run(tmp_path, flags, REWARDS)
    run.engine.stale = -math.log(ratio)
    metrics = run.update(run.batches())
    assert value(metrics, "policy/clip_fraction") == clipped
    (found,) = run.policy.gradients
    stopped = [(a > 0) == (ratio > 1) and bool(clipped) for a in ADVANTAGES]
    assert [float(found[4 + i]) == 0.0 for i in range(6)] == stopped


def test_the_quantiles_of_the_mismatch_are_of_all_tokens(tmp_path: Path) -> None:
    """Of 999 tokens whose log-probs are off by 1/1000, 2/1000, ... within 1/64."""
    flags = "--grpo-prompts-per-step 4 --grpo-group-size 100 --micro-batch-size 50"
    run = make_run(tmp_path, flags)
    samples = [sample(i, float(i % 2)) for i in range(400)]
    ids = [torch.tensor(response_of(i), dtype=torch.long) for i in range(400)]
    offsets = torch.arange(1, 1000).flip(0) / 1000
    parts = torch.split(offsets, [len(i) for i in ids])
    pairs = zip(ids, parts, strict=True)
    said = [response(i.tolist(), first_table()[i] + off) for i, off in pairs]
    metrics = run.update(run.prepared(run.hold(samples, said)))
    assert value(metrics, "mismatch/max_abs_logprob") == pytest.approx(0.999, abs=1e-5)
    for name, exact in (("p50", 0.501), ("p99", 0.991), ("p999", 0.999)):
        found = value(metrics, f"mismatch/{name}_abs_logprob")
        assert found <= exact + 1e-5 < found * (1 + 1 / 64), name


@pytest.mark.parametrize("choice", ["on-policy", "recompute", "rollout"])
@pytest.mark.parametrize("per_update", [6, 3])
def test_mismatch_is_taken_at_the_weights_that_sampled(
    tmp_path: Path, choice: str, per_update: int
) -> None:
    """Learning between the updates is not counted as a difference of engine and trainer."""
    run = make_run(tmp_path, f"--old-logprob {choice} --global-batch-size {per_update}", REWARDS)
    run.engine.stale = 0.125
    metrics = run.update(run.batches())
    assert value(metrics, "mismatch/mean_abs_logprob") == pytest.approx(0.125)
    assert value(metrics, "mismatch/max_abs_logprob") == pytest.approx(0.125)
    assert value(metrics, "mismatch/p99_abs_logprob") == pytest.approx(0.125, rel=1 / 64)
    assert value(metrics, "mismatch/k3") == pytest.approx(math.exp(-0.125) + 0.125 - 1, rel=1e-4)
    known = 3 if choice == "rollout" and per_update == 3 else 6
    counted = metrics["mismatch/mean_abs_logprob"]
    assert isinstance(counted, Mean) and counted.weight == sum(COUNTS[:known])


def test_a_batch_without_a_trained_token_is_skipped_and_counted(tmp_path: Path) -> None:
    """A group that answered nothing has no gradient, not NaN."""
    run = make_run(tmp_path)
    empty = hold(run, [sample(i, ids=()) for i in range(6)])
    metrics = run.update(run.prepared(empty))
    assert value(metrics, "optimizer/skipped") == 1.0
    assert (run.state.version, run.policy.gradients) == (0, [])
    torch.testing.assert_close(run.policy.table.detach(), first_table(), rtol=0, atol=0)


# --- the probe ---------------------------------------------------------------------------------


def test_the_probe_compares_engine_and_trainer_and_goes_back_to_training(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert check_engine(run.parts, run.state) == 0.0
    assert run.parts.scheduler.state is Phase.TRAIN
    torch.testing.assert_close(run.engine.weights, first_table(), rtol=0, atol=0)


@pytest.mark.parametrize("stale", [0.5, -0.002, math.nan])
def test_an_engine_that_computes_with_stale_tensors_is_found(tmp_path: Path, stale: float) -> None:
    """Its parameters are bit-equal, its log-probs are not."""
    run = make_run(tmp_path)
    run.engine.stale = stale
    told = rf"mean \|log p.* is {abs(stale):g}, above --rl-sync-check-tol 0\.001, although"
    with pytest.raises(RuntimeError, match=told):
        check_engine(run.parts, run.state)


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        ("", 1e-3),
        ("--bf16", 0.2),
        ("--rollout-dtype bfloat16", 0.2),
        ("--bf16 --rollout-dtype float32", 0.2),
        ("--bf16 --rl-sync-check-tol 1e-4", 1e-4),
    ],
)
def test_the_tolerance_of_the_probe_follows_the_precision(
    tmp_path: Path, flags: str, limit: float
) -> None:
    """bfloat16 alone makes a mean difference of about 5e-3."""
    run = make_run(tmp_path, flags)
    run.engine.stale = 0.9 * limit
    check_engine(run.parts, run.state)
    run.engine.stale = 1.1 * limit
    with pytest.raises(RuntimeError, match=f"above --rl-sync-check-tol {limit:g}"):
        check_engine(run.parts, run.state)
