"""Saves and resumes an RL run: its models, and what a checkpoint holds besides them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mindspeed_rl.colocation.scheduler import Phase
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.memory import CRITIC_OWNERS, MemoryOwner
from mindspeed_rl.rl.components import Components, RunState
from mindspeed_rl.rl.dynamic_sampling import Group
from mindspeed_rl.rl.report import RunReporter
from mindspeed_rl.rl.saved_drafts import restore_drafts, save_drafts
from mindspeed_rl.samples.columns import LOSS_MASK, TOKEN_IDS, Column
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey
from mindspeed_rl.samples.store import ResponseTensors, SampleStore
from mindspeed_rl.trainer import run_checkpoint


def start(run: Components) -> tuple[RunState, RunReporter]:
    """Return the state and report to continue from: ``--load``'s or new. Collective: the world.

    The engine has no weights yet, so the first sync copies the restored weights to it, whatever
    their version.

    Raises:
        UsageError: the prompts are not those of the checkpoint, or this run cannot take over the
            groups that it carries.
    """
    run.scheduler.require(Phase.TRAIN, "load")
    state = RunState.at_start(run.config, run.data.train)
    with run.scheduler.onloaded(*CRITIC_OWNERS, MemoryOwner.REFERENCE):
        companions = run.models.companions(run.config.rl.ref_update_interval)
        loaded = run_checkpoint.load(run.job, run.models.policy, companions)
    extra = loaded.extra
    if not extra:
        return state, RunReporter(run, state)
    same_prompts = state.sampler.fingerprint == extra["sampler"]["fingerprint"]
    if same_prompts:
        # First, as an epoch that the sampler begins may be ordered by them.
        state.lengths.load_state_dict(extra["lengths"])
    state.sampler.load_state_dict(
        extra["sampler"], allow_changed_data=run.config.checkpoint.allow_changed_data
    )
    state.step, state.version = loaded.step, extra["version"]
    if run.config.kl.rl_kl_target:
        state.kl_beta = extra["kl_beta"]
    if same_prompts:
        partial = run.config.balance.partial_rollout_tokens > 0
        restore_carryover(run.samples, state, extra, continues_partial=partial)
        if state.carried_groups and not run.config.sampling.grpo_filter_groups_with_same_reward:
            run.job.log_rank0(
                f"--load: {len(state.carried_groups)} groups that the filter of the saved run "
                "accepted beyond its need are dropped: this run is without "
                "--grpo-filter-groups-with-same-reward"
            )
            state.carried_groups = []
    restore_drafts(run, str(run.config.checkpoint.load))
    return state, RunReporter(run, state, loaded.step, extra["report"])


def restore_carryover(
    store: SampleStore,
    state: RunState,
    extra: Mapping[str, Any],
    *,
    continues_partial: bool,
) -> None:
    """Restore carried groups; each rank keeps the tokens that it is to hold. Local.

    Args:
        store: Store that takes the tokens of the carried samples.
        state: State after the step of the checkpoint, which takes the groups.
        extra: What the checkpoint holds besides the models.
        continues_partial: Whether this run continues incomplete responses.

    Raises:
        UsageError: the checkpoint has incomplete responses, but the run has no partial rollouts.
    """
    groups, responses = restored_carryover(
        extra["carryover"],
        state.step,
        store.columns,
        store.engine.num_groups,
        extra["num_groups"],
    )
    num_partial = extra["num_partial"]
    if num_partial and not continues_partial:
        raise UsageError(
            f"--load: {num_partial} groups of the checkpoint have incomplete responses; give "
            "--partial-rollout-tokens as in the run that saved it"
        )
    border = len(groups) - num_partial
    state.carried_groups, state.partial_groups = list(groups[:border]), list(groups[border:])
    store.begin_step(state.step, [])
    store.keep_responses(responses, [s for group in groups for s in group])


def save_if_due(run: Components, state: RunState, report: RunReporter) -> None:
    """Save the state after the step when ``--save-interval`` or the end asks for it. Collective."""
    if not run_checkpoint.save_is_due(
        run.config.checkpoint, run.config.train.train_iters, state.step
    ):
        return
    run.scheduler.require(Phase.TRAIN, "save")
    carried = [*state.carried_groups, *state.partial_groups]
    responses = run.samples.fetch([s for group in carried for s in group])
    extra: dict[str, Any] = {
        "sampler": state.sampler.state_dict(),
        "version": state.version,
        "kl_beta": state.kl_beta,
        "carryover": carryover_state(carried if run.job.world.rank == 0 else [], responses),
        "num_partial": len(state.partial_groups),
        "num_groups": run.plan.engine.num_groups,
        "lengths": state.lengths.state_dict(),
        "report": report.state_dict(),
    }
    companions = run.models.companions(run.config.rl.ref_update_interval)
    # A reference that is not saved would only take memory beside what a save gathers.
    reference = (MemoryOwner.REFERENCE,) if "reference" in companions else ()
    with run.phase("save"), run.scheduler.onloaded(*CRITIC_OWNERS, *reference):
        run_checkpoint.save(run.job, run.models.policy, state.step, extra, companions)
        save_drafts(run, str(run.config.checkpoint.save))


def carryover_state(
    groups: Sequence[Group], responses: Sequence[ResponseTensors]
) -> list[list[dict[str, Any]]]:
    """Return the groups as plain types for a checkpoint; fp32 log-probs keep their exact values.

    Args:
        groups: Groups of samples.
        responses: Responses of all samples of the groups, in order.
    """
    given = iter(responses)
    return [[_plain(s, next(given)) for s in group] for group in groups]


def _plain(sample: RolloutInfo, response: ResponseTensors) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "prompt_index": sample.prompt_index,
        "columns": {name: values.tolist() for name, values in response.items()},
        "stopped": sample.stopped,
        "weights_version": sample.weights_version,
        "reward": sample.reward,
        "parts": list(sample.parts),
        "spans": [list(span) for span in sample.earlier_versions],
        "group": sample.group,
    }


def restored_carryover(
    state: Sequence[Sequence[Mapping[str, Any]]],
    step: int,
    columns: Sequence[Column],
    num_groups: int,
    saved_groups: int = 0,
) -> tuple[list[Group], list[ResponseTensors]]:
    """Invert :func:`carryover_state`: return the groups, and all responses in order.

    Args:
        state: State in the checkpoint.
        step: Step after which it was saved.
        columns: Columns that the run keeps of every token.
        num_groups: Number of groups of engine ranks.
        saved_groups: ``num_groups`` of the run that saved the state. Where both are equal, each
            rank group gets its own samples back, since who trains on a sample depends on it;
            otherwise the rank groups get samples in turn.

    Raises:
        UsageError: the checkpoint lacks a column that this run needs.
    """
    groups: list[Group] = []
    responses: list[ResponseTensors] = []
    for fields_of_group in state:
        samples = []
        for fields in fields_of_group:
            number = len(responses)
            response = _response(fields["columns"], columns)
            mask = response.get(LOSS_MASK.name)
            num_tokens = response[TOKEN_IDS.name].size(0)
            samples.append(
                RolloutInfo(
                    sample_id=fields["sample_id"],
                    prompt_index=fields["prompt_index"],
                    num_tokens=num_tokens,
                    num_sampled=num_tokens if mask is None else int(mask.sum()),
                    stopped=fields["stopped"],
                    weights_version=fields["weights_version"],
                    group=fields["group"] if saved_groups == num_groups else number % num_groups,
                    reward=fields["reward"],
                    parts=tuple(fields["parts"]),
                    key=SampleKey(step, number),
                    earlier_versions=tuple(
                        (version, tokens) for version, tokens in fields["spans"]
                    ),
                )
            )
            responses.append(response)
        groups.append(samples)
    return groups, responses


def _response(values: Mapping[str, Any], columns: Sequence[Column]) -> ResponseTensors:
    for column in columns:
        if column.name not in values:
            raise UsageError(
                f"--load: the checkpoint carries responses over without their {column.name}, which "
                f"this run needs (filled by {column.filled_by}); resume with the flags of the run "
                "that saved it, or from a checkpoint without groups that are carried over"
            )
    return {c.name: torch.tensor(values[c.name], dtype=c.dtype) for c in columns}
