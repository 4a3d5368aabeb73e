"""Dynamic sampling, overlong filtering and punishment on a run whose model is a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rl_run import TableRewards, TableRun, make_run, response, value
from support.table_engine import response_of

from mindspeed_rl.checkpoint.record_tensors import separated, with_tensors, write_tensors
from mindspeed_rl.metrics.metric_set import Mean
from mindspeed_rl.rl.advantages import shaped_rewards
from mindspeed_rl.rl.dynamic_sampling import FilledStep, Group, fill_step
from mindspeed_rl.rl.resume import restore_carryover
from mindspeed_rl.samples.columns import response_columns
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey
from mindspeed_rl.samples.sample_metrics import sample_metrics
from mindspeed_rl.samples.saved_responses import carryover_state, restored_carryover
from mindspeed_rl.samples.store import ResponseTensors

FILTER = "--grpo-filter-groups-with-same-reward"
NAN = math.nan


def group_of(number: int, rewards: Sequence[float]) -> Group:
    return [
        RolloutInfo(i, number, 2, 2, True, 3, 0, r, (r,), key=SampleKey(2, i))
        for i, r in enumerate(rewards)
    ]


def filled(rows: list[Sequence[float]], num_groups: int, **changes: Any) -> FilledStep:
    """Draws the rows in order; asking for more than there are fails."""
    supply = iter(group_of(i, row) for i, row in enumerate(rows))
    options: dict[str, Any] = {"max_resample": 2, "exhausted": "train-on-partial", "factor": 1.0}
    carried = changes.pop("carried", [])

    def draw(missing: int, count: int, attempt: int) -> list[Group]:
        return [next(supply) for _ in range(count)]

    return fill_step(num_groups, carried, draw, **(options | changes))


def numbers(groups: Sequence[Group]) -> list[int]:
    return [g[0].prompt_index for g in groups]


COLUMNS = response_columns(has_environment=False, experts=None)


def assert_equal(found: Sequence[ResponseTensors], wanted: Sequence[ResponseTensors]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name].to(other[name].dtype), other[name]) for name in one)


GOOD, ALL_0, ALL_1 = (1.0, 0.0), (0.0, 0.0), (1.0, 1.0)


def test_groups_of_equal_rewards_are_replaced() -> None:
    """Rounds ask for what is missing; one abstention leaves nothing to compare."""
    result = filled([GOOD, ALL_0, ALL_1, GOOD, (NAN, 1.0), GOOD], 3)
    assert numbers(result.groups) == [0, 3, 5]
    assert numbers(result.generated) == [0, 1, 2, 3, 4, 5]
    found = {name: value(result.metrics, name) for name in result.metrics}
    assert found == {
        "sampling/accepted": 3 / 6,
        "sampling/all_0": 1 / 6,
        "sampling/all_1": 1 / 6,
        "sampling/rounds": 3,
        "sampling/missing_groups": 0,
        "sampling/surplus_groups": 0,
    }


def test_the_surplus_starts_the_next_step() -> None:
    result = filled([GOOD, GOOD, ALL_0, GOOD], 2, factor=2.0)
    assert (numbers(result.groups), numbers(result.carried)) == ([0, 1], [3])
    rest = filled([ALL_0, GOOD], 2, carried=result.carried, factor=1.5)
    assert numbers(rest.groups) == [3, 1] and rest.carried == []
    enough = filled([], 1, carried=rest.groups)
    assert numbers(enough.groups) == [3] and numbers(enough.carried) == [1]
    assert enough.generated == [] and value(enough.metrics, "sampling/rounds") == 0


@given(
    st.lists(st.sampled_from([GOOD, ALL_0, ALL_1, (NAN, NAN)]), min_size=60, max_size=60),
    st.integers(1, 6),
    st.sampled_from([1.0, 1.5, 3.0]),
    st.sampled_from(["train-on-partial", "keep-zero-std"]),
)
@settings(deadline=None, max_examples=50)
def test_nothing_is_lost_or_doubled(
    rows: list[Sequence[float]], num_groups: int, factor: float, exhausted: str
) -> None:
    result = filled(rows, num_groups, factor=factor, exhausted=exhausted)
    accepted = [i for i in numbers(result.generated) if rows[i] is GOOD]
    kept = numbers(result.groups) + numbers(result.carried)
    assert [i for i in kept if rows[i] is GOOD] == accepted
    assert len(set(kept)) == len(kept) and len(result.groups) <= num_groups
    if exhausted == "keep-zero-std":
        assert len(result.groups) == num_groups


def through_checkpoint(state: Any, folder: Path) -> Any:
    """The state as a checkpoint gives it back."""
    plain, tensors = separated(state)
    write_tensors(folder, tensors)
    return with_tensors(folder, json.loads(json.dumps(plain)))


def test_the_surplus_survives_a_checkpoint(tmp_path: Path) -> None:
    """Through the record and its file of tensors, bit by bit, an abstention included."""
    groups = [group_of(7, (0.1, NAN))]
    ids = (4, 1)
    given = [response(ids, [-1.5, -0.1 * i]) for i in range(2)]
    state = through_checkpoint(carryover_state(groups, given), tmp_path)
    ((first, second),), found = restored_carryover(state, 8, COLUMNS, num_groups=2)
    assert_equal(found, given)
    assert replace(first, key=SampleKey(2, 0)) == groups[0][0]
    assert (first.key, second.key) == (SampleKey(8, 0), SampleKey(8, 1))
    assert math.isnan(second.reward) and (first.group, second.group) == (0, 1)


def test_an_older_checkpoint_has_the_tokens_as_numbers() -> None:
    given = [response((4, 1), (-1.5, -0.25)), response((7,), (-0.1,))]
    samples = [replace(group_of(7, (0.5,))[0], sample_id=i) for i in range(2)]
    state = carryover_state([samples], given)
    groups = [
        [
            {**fields, "columns": {n: v.tolist() for n, v in given[i].items()}}
            for i, fields in enumerate(group)
        ]
        for group in state["samples"]
    ]
    for fields in groups[0]:
        del fields["num_tokens"]
    new, old = (
        restored_carryover(s, 8, COLUMNS, 2) for s in (state, json.loads(json.dumps(groups)))
    )
    assert new[0] == old[0] and [s.num_tokens for s in old[0][0]] == [2, 1]
    assert_equal(new[1], given)
    assert_equal(old[1], given)
    assert restored_carryover([], 8, COLUMNS, 2) == ([], [])


@pytest.mark.parametrize(("engines", "held"), [(3, [2, 0, 2]), (2, [0, 1, 0])])
def test_engines_of_the_same_number_hold_what_they_held(engines: int, held: list[int]) -> None:
    """Placement prefers the holder, so a resumed run would else train on other ranks."""
    group = [replace(group_of(7, (0.5,))[0], sample_id=i, group=g) for i, g in enumerate((2, 0, 2))]
    given = [response((4,), (-1.5,))] * 3
    state = carryover_state([group], given)
    ((*restored,),), _ = restored_carryover(state, 8, COLUMNS, engines, saved_groups=3)
    assert [s.group for s in restored] == held


def test_a_resumed_run_keeps_the_surplus_that_it_has_a_share_in(tmp_path: Path) -> None:
    """And the next step but one drops it."""
    run = make_run(tmp_path, f"{FILTER} --rl-resample-factor 2 --old-logprob rollout")
    run.set_pool(by_prompt({p.text for p in run.parts.data.train}))
    run.generate()
    kept = [s for group in run.state.carried_groups for s in group]
    before = run.said(kept)
    state = through_checkpoint(carryover_state(run.state.carried_groups, before), tmp_path)
    again = make_run(tmp_path, f"{FILTER} --rl-resample-factor 2 --old-logprob rollout")
    extra = {"carryover": state, "num_groups": 1, "num_partial": 0}
    again.state.step = 1
    restore_carryover(again.parts.samples, again.state, extra, continues_partial=False)
    taken = again.generate(2).samples
    assert_equal(again.said(taken), before)
    assert again.parts.samples.cache.num_bytes == 8 * sum(s.num_tokens for s in taken)
    again.parts.samples.cache.begin_step(3)
    assert again.parts.samples.cache.num_bytes == 0
    with pytest.raises(RuntimeError, match=r"sample 0 of step 1 .*step 3"):
        again.said(taken)


# --- in a run ----------------------------------------------------------------------------------


def by_prompt(mixed: set[str]) -> TableRewards:
    """Samples of these prompts are right and wrong in turns, all others wrong."""
    return TableRewards(lambda r: float(r.prompt in mixed and r.sample_id % 2 == 0))


def order(run: TableRun) -> list[int]:
    """The prompts that the run will draw."""
    return type(run.state.sampler)(12, run.config.train.seed).next(12)


def test_a_step_draws_until_it_has_its_groups(tmp_path: Path) -> None:
    """Every round has seeds of its own; the report sees all that was drawn."""
    run = make_run(tmp_path, f"{FILTER} --rl-max-resample 9")
    drawn = order(run)
    run.set_pool(by_prompt({run.parts.data.train[drawn[i]].text for i in (1, 4)}))
    rollouts = run.generate()
    assert [s.prompt_index for s in rollouts.samples] == [drawn[1]] * 3 + [drawn[4]] * 3
    assert [s.sample_id for s in rollouts.samples] == list(range(6))
    assert len(rollouts.generated) == 5 * 3 and run.state.carried_groups == []
    asked = [r for requests, _ in run.engine.asked for r in requests]
    assert len({r.seed for r in asked}) == len(asked) == 15
    metrics = run.train_on(rollouts)
    assert value(metrics, "sampling/accepted") == pytest.approx(2 / 5)
    assert run.state.version == 1 and run.policy.gradients[0].any()
    assert (
        sample_metrics(rollouts.generated, run.parts.reward_names, 3)["reward/degenerate_groups"]
        == 3 / 5
    )


def test_a_partial_step_has_its_own_denominators(tmp_path: Path) -> None:
    run = make_run(tmp_path, f"{FILTER} --rl-max-resample 1")
    run.set_pool(by_prompt({run.parts.data.train[order(run)[0]].text}))
    rollouts = run.generate()
    (batch,) = run.build(rollouts.samples).updates
    counts = [s.num_tokens for s in rollouts.samples]
    assert len(counts) == 3
    assert (batch.denominators.tokens, batch.denominators.sequences) == (sum(counts), 3)


def test_a_step_without_a_group_is_skipped_with_all_its_names(tmp_path: Path) -> None:
    """And leaves an adapted coefficient."""
    kl = "--grpo-kl-beta 0.01 --rl-kl-in-reward --rl-kl-target 0.1 --rl-kl-horizon 100"
    run = make_run(tmp_path, f"{FILTER} --rl-max-resample 0 {kl}")
    rollouts = run.generate()
    metrics = run.train_on(rollouts)
    assert rollouts.samples == [] and len(rollouts.generated) == 6
    assert run.state.version == 0 and value(metrics, "optimizer/skipped") == 1.0
    assert run.state.kl_beta == 0.01
    plain = make_run(tmp_path, kl, {0: 1.0})
    names = plain.train_on(plain.generate()).keys()
    assert names - metrics.keys() == {"optimizer/grad_norm", "optimizer/lr"}


@pytest.mark.parametrize("reward", [0.0, 1.0])
@pytest.mark.parametrize("policy", ["train-on-partial", "keep-zero-std", "stop"])
def test_all_wrong_and_all_right_data_end_as_the_flag_says(
    policy: str, reward: float, tmp_path: Path
) -> None:
    """Bounded rounds, then the policy: skipped, trained on advantages of 0, or the end."""
    flags = f"{FILTER} --rl-max-resample 1 --rl-resample-exhausted {policy}"
    run = make_run(tmp_path, flags)
    run.set_pool(TableRewards(lambda r: reward))
    if policy == "stop":
        with pytest.raises(RuntimeError, match="--rl-resample-exhausted stop"):
            run.generate()
        return
    rollouts = run.generate()
    metrics = run.train_on(rollouts)
    if policy == "train-on-partial":
        assert rollouts.samples == [] and value(metrics, "optimizer/skipped") == 1.0
        return
    assert len(rollouts.samples) == 6 and run.state.version == 1
    assert value(metrics, "loss/policy") == 0.0 and value(metrics, "optimizer/grad_norm") == 0.0


def test_surplus_of_older_weights_is_no_mismatch(tmp_path: Path) -> None:
    """It is trained on with the ratio to the weights that sampled, and counts as learning."""
    run = make_run(
        tmp_path,
        f"{FILTER} --rl-resample-factor 2 --old-logprob recompute "
        "--rl-inference-logprobs-is-correction",
    )
    run.set_pool(by_prompt({p.text for p in run.parts.data.train}))
    first = run.generate()
    assert len(run.state.carried_groups) == 2 and len(first.generated) == 12
    run.train_on(first)
    second = run.generate(2)
    assert [s.weights_version for s in second.samples] == [0] * 6
    assert second.generated == second.samples, (
        "nothing was sampled: the report tells what is trained on"
    )
    metrics = run.train_on(second, 2)
    assert value(metrics, "mismatch/max_abs_logprob") == -math.inf
    weight = metrics["correction/weight"]
    assert isinstance(weight, Mean) and weight.value != 1.0


def test_truncated_responses_are_left_out_of_the_loss_alone(tmp_path: Path) -> None:
    """Even samples are cut: they stay in the baseline of their group."""
    rewards = dict(enumerate((1.0, 0.0, 0.0, 1.0, 1.0, 0.0)))
    run = make_run(tmp_path, "--rl-overlong-filtering --grpo-no-std-normalization", rewards)
    samples = run.generate().samples
    batches = run.logprobs(run.build(samples), samples)
    batches = run.advantages(batches, samples, 1)
    kept = [i for i in range(6) if i % 2]
    counts = [len(response_of(i)) for i in kept]
    (batch,) = batches.updates
    assert (batch.denominators.tokens, batch.denominators.sequences) == (sum(counts), 3)
    found = torch.cat([m.column("advantages") for m in batch.micro_batches])
    wanted = [
        a for i, n in zip(kept, counts, strict=True) for a in [rewards[i] - (1 + i // 3) / 3] * n
    ]
    targets = torch.cat([m.targets[m.loss_mask] for m in batch.micro_batches])
    tokens = [t for i in kept for t in response_of(i)]
    pairs = sorted(zip(targets.tolist(), found.tolist(), strict=True))  # placed in any order
    assert [t for t, _ in pairs] == sorted(tokens)
    expected = sorted(zip(tokens, wanted, strict=True))
    assert [a for _, a in pairs] == pytest.approx([a for _, a in expected])


def test_long_responses_are_punished_before_the_baseline(tmp_path: Path) -> None:
    """Responses of 1, 3 and 3 tokens with a limit of 4: equal rewards are equal no more."""
    flags = (
        "--rollout-max-response-length 4 --rl-overlong-buffer 2 --rl-advantage-estimator dr_grpo"
    )
    run = make_run(tmp_path, flags)
    samples = run.generate().samples
    lengths = [s.num_tokens for s in samples]
    shaped = shaped_rewards(run.config, samples, 1)
    assert shaped == [-max(0, n - 2) / 2 for n in lengths] and len(set(shaped)) > 1
