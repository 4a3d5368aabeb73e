"""Partial rollouts of a run whose model is a table: nothing is lost, versions are per token."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from support.rl_run import TableRewards, TableRun, make_run, response, value
from support.table_engine import STOP, TableEngine

from mindspeed_rl.checkpoint.record_tensors import FILE, separated, with_tensors, write_tensors
from mindspeed_rl.checkpoint.resume import CheckpointRecord, begin, commit, marks_of, read_record
from mindspeed_rl.core.types import Completion
from mindspeed_rl.metrics.metric_set import MetricSet
from mindspeed_rl.rl.logprobs import check_on_policy
from mindspeed_rl.rl.resume import restore_carryover
from mindspeed_rl.rl.rollouts import RolloutBatch, generate_rollouts
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings
from mindspeed_rl.samples.columns import experts_column, response_columns
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.samples.saved_responses import carryover_state, restored_carryover

TOKENS = 3
LIMIT = 8  # of a response, in make_run
FLAGS = f"--partial-rollout-tokens {TOKENS} --rl-resample-factor 4 "
CORRECTED = "--old-logprob recompute --rl-inference-logprobs-is-correction "
FILTER = "--grpo-filter-groups-with-same-reward "


class Sampler(TableEngine):
    """Samples token by token until a stop token comes or the limit of the request.

    Attributes:
        made: versions of the weights that sampled the last token of a sequence.
        grown: most tokens that a request got in one call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[tuple[int, ...], set[int]] = defaultdict(set)
        self.grown = 0

    def completion(
        self, request: GenerationRequest, settings: SamplingSettings, version: int
    ) -> Completion:
        """The log-probs are those of the engine's weights, which ``version`` has."""
        draw, limit = random.Random(request.seed), request.max_tokens
        ids, logprobs = list(request.prefix_tokens), list(request.prefix_logprobs)
        while len(ids) < (limit or settings.max_response_tokens) and ids[-1:] != [STOP]:
            ids.append(STOP if draw.random() < 0.25 else draw.randint(4, 63))
            logprobs.append(float(self.weights[ids[-1]]))
            self.made[(*request.token_ids, *ids)].add(version)
        self.grown = max(self.grown, len(ids) - len(request.prefix_tokens))
        reason = "stop" if ids[-1] == STOP else "length"
        return Completion(tuple(ids), tuple(logprobs), reason, version)


def partial_run(folder: Path, flags: str = FLAGS + CORRECTED) -> TableRun:
    folder.mkdir(exist_ok=True)
    run = make_run(folder, flags)
    run.set_engine(Sampler())
    run.set_pool(TableRewards(lambda r: float(len(r.response))))
    return run


def step_of(run: TableRun, step: int) -> tuple[RolloutBatch, MetricSet]:
    rollouts = run.generate(step)
    return rollouts, run.train_on(rollouts, step)


def said(run: TableRun, samples: Sequence[RolloutInfo]) -> list[tuple[int, ...]]:
    """Prompt and response of samples that the cache has."""
    found = run.said(samples)
    return [
        (*run.parts.data.train[s.prompt_index].token_ids, *said_by["token_ids"].tolist())
        for s, said_by in zip(samples, found, strict=True)
    ]


def test_every_group_is_trained_on_once_and_whole(tmp_path: Path) -> None:
    """Two groups per step for eight steps, of the prompts in the order in which they were drawn."""
    run = partial_run(tmp_path)
    trained: list[int] = []
    stale = 0
    for step in range(1, 9):
        rollouts, _ = step_of(run, step)
        assert len(rollouts.samples) == 6
        for s in rollouts.samples:
            assert s.stopped or s.num_tokens == LIMIT, "what is trained on is complete"
            assert not math.isnan(s.reward)
        trained += [s.prompt_index for s in rollouts.samples[::3]]
        stale += sum(bool(s.earlier_versions) for s in rollouts.samples)
    assert stale, "some responses must have gone on"
    carried = [
        group[0].prompt_index for group in (*run.state.carried_groups, *run.state.partial_groups)
    ]
    drawn = Counter(
        type(run.state.sampler)(12, run.config.train.seed).next(len(trained) + len(carried))
    )
    assert Counter(trained + carried) == drawn, "no prompt is lost or trained on twice"
    assert cast(Sampler, run.engine).grown == TOKENS


def test_every_token_knows_the_weights_that_sampled_it(tmp_path: Path) -> None:
    run = partial_run(tmp_path)
    engine = cast(Sampler, run.engine)
    seen = set()
    for step in range(1, 7):
        version = run.state.version
        run.to_rollout()
        run.state.step = step
        rollouts = generate_rollouts(run.parts, run.state)
        for s, ids in zip(rollouts.samples, said(run, rollouts.samples), strict=True):
            prompt = len(ids) - s.num_tokens
            assert len(s.versions) == s.num_tokens and s.versions == sorted(s.versions)
            for i, sampled_by in enumerate(s.versions):
                assert sampled_by in engine.made[ids[: prompt + i + 1]]
            assert s.num_stale(version) == sum(v != version for v in s.versions)
            seen.add(len(set(s.versions)))
        run.to_train()
        run.state.version += 1
    assert max(seen) > 1


def test_a_response_is_scored_once_when_it_is_whole(tmp_path: Path) -> None:
    run = partial_run(tmp_path)
    trained = [s for step in range(1, 6) for s in step_of(run, step)[0].samples]
    carried = [s for group in (*run.state.carried_groups, *run.state.partial_groups) for s in group]
    whole = [s for s in (*trained, *carried) if not s.is_incomplete(LIMIT)]
    assert run.pool.num_scored == len(whole)
    assert all(math.isnan(s.reward) for s in carried if s.is_incomplete(LIMIT))


def test_a_step_ends_when_enough_is_complete(tmp_path: Path) -> None:
    """With more in flight than is needed, the long ones are left for the next step."""
    run = partial_run(tmp_path)
    _, first = step_of(run, 1)
    assert run.state.partial_groups and value(first, "partial/pending_groups") == len(
        run.state.partial_groups
    )
    assert value(first, "partial/passes") <= math.ceil(LIMIT / TOKENS)
    assert value(first, "partial/stale_tokens") == 0
    waiting = len(run.state.partial_groups)
    second, metrics = step_of(run, 2)
    assert value(metrics, "partial/carried_groups") in (0, waiting)
    stale = sum(s.num_stale(1) for s in second.generated) / sum(
        s.num_tokens for s in second.generated
    )
    assert value(metrics, "partial/stale_tokens") == pytest.approx(stale)


def test_tokens_of_older_weights_are_no_mismatch(tmp_path: Path) -> None:
    """Tokens of the present weights have none; those of others would have, as the table moved."""
    run = partial_run(tmp_path)
    mixed = weighed = 0
    for step in range(1, 7):
        rollouts, metrics = step_of(run, step)
        mixed += any(
            0 < s.num_stale(run.state.version - 1) < s.num_tokens for s in rollouts.samples
        )
        largest = value(metrics, "mismatch/max_abs_logprob")
        assert largest == -math.inf or largest < 1e-6
        weight = value(metrics, "correction/weight")
        stale = any(s.num_stale(run.state.version - 1) for s in rollouts.samples)
        assert stale or abs(weight - 1.0) < 1e-6
        weighed += abs(weight - 1.0) > 1e-6
    assert weighed
    assert mixed, "a response of two versions must have been trained on"


def test_the_ratio_is_to_the_weights_that_sampled(tmp_path: Path) -> None:
    """With the engine's log-probs as old ones, each token has those of its own version."""
    run = partial_run(tmp_path, FLAGS + "--old-logprob rollout")
    moved = 0  # tokens whose log-prob an update has changed since they were sampled
    for step in range(1, 5):
        run.to_rollout()
        run.state.step = step
        rollouts = generate_rollouts(run.parts, run.state)
        run.to_train()
        batches = run.build(rollouts.samples)
        annotated = run.logprobs(batches, rollouts.samples)
        for micro in annotated.micro_batches:
            old, fresh = micro.column("old_logprobs"), micro.column("on_policy_mask")
            assert torch.equal(old, micro.column("rollout_logprobs"))
            table = run.policy.table.detach()
            present = table[micro.targets[micro.loss_mask]]
            same = (old - present).abs() < 1e-6
            assert same[fresh].all()
            moved += int((~same).sum())
        batches = run.advantages(annotated, rollouts.samples, step, None)
        run.update(batches)
    assert moved


def test_a_checkpoint_takes_the_open_responses_along(tmp_path: Path) -> None:
    """Four steps at once, and two, a restart and two: the same samples, rewards and versions."""
    whole, first, again = (partial_run(tmp_path / name) for name in ("whole", "first", "again"))
    wanted = [
        (s, said(whole, s)) for s in (step_of(whole, step)[0].samples for step in range(1, 5))
    ]
    found = [(s, said(first, s)) for s in (step_of(first, step)[0].samples for step in (1, 2))]
    carried = [*first.state.carried_groups, *first.state.partial_groups]
    responses = first.said([s for group in carried for s in group])
    saved = {
        "carryover": carryover_state(carried, responses),
        "num_groups": 1,
        "num_partial": len(first.state.partial_groups),
    }
    partial = begin(tmp_path, 2, needed_bytes=0)
    plain, tensors = separated(saved)
    write_tensors(partial, tensors)
    record = CheckpointRecord(2, 2, {}, {}, "AdamW", has_rng=True, extra=plain)
    path = commit(tmp_path, record)
    assert marks_of(path)[FILE].xxh3, "the tokens have a checksum like all files"
    extra = with_tensors(path, read_record(path).extra)
    again.state.sampler.load_state_dict(first.state.sampler.state_dict())
    again.state.version = first.state.version
    with torch.no_grad():
        again.policy.table.copy_(first.policy.table)
    assert first.state.partial_groups
    again.state.step = 2
    restore_carryover(again.parts.samples, again.state, extra, continues_partial=True)
    found += [(s, said(again, s)) for s in (step_of(again, step)[0].samples for step in (3, 4))]
    for (samples, texts), (others, same) in zip(found, wanted, strict=True):
        assert texts == same
        assert [(s.reward, s.versions) for s in samples] == [(s.reward, s.versions) for s in others]
    assert torch.equal(again.policy.table, whole.policy.table)


def test_open_responses_need_a_run_that_lets_them_go_on(tmp_path: Path) -> None:
    run = partial_run(tmp_path, "")
    extra = {"carryover": [[], [], []], "num_groups": 1, "num_partial": 2}
    with pytest.raises(ValueError, match="--partial-rollout-tokens"):
        restore_carryover(run.parts.samples, run.state, extra, continues_partial=False)


def test_a_run_that_replays_experts_needs_them_in_the_checkpoint() -> None:
    group = [RolloutInfo(0, 0, 1, 1, False, 0, 0, math.nan)]
    state = carryover_state([group], [response([4], [-1.0])])
    columns = response_columns(has_environment=False, experts=experts_column(8, 4))
    with pytest.raises(ValueError, match=r"--load: .* experts"):
        restored_carryover(state, 1, columns, 1)


def test_dynamic_sampling_goes_on_with_what_is_open(tmp_path: Path) -> None:
    """Seeds of all passes of a step differ, also over rounds of resampling."""
    run = partial_run(tmp_path, FLAGS + CORRECTED + FILTER + "--rl-max-resample 9")
    for step in range(1, 5):
        rollouts, _ = step_of(run, step)
        groups = [rollouts.samples[i : i + 3] for i in (0, 3)]
        assert all(len({s.reward for s in group}) > 1 for group in groups)


def test_on_policy_batches_have_no_older_tokens() -> None:
    old = RolloutInfo(4, 0, 9, 9, True, 0, 0, 1.0, earlier_versions=((-1, 2),))
    with pytest.raises(RuntimeError, match=r"\[4\]"):
        check_on_policy([old], 0)
