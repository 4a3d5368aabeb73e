"""Saves and resumes an RL run: its models, and what a checkpoint holds besides them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mindspeed_rl.checkpoint.finite import nonfinite_numbers
from mindspeed_rl.colocation.scheduler import Phase
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.alarms import GradientWatch
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.memory import CRITIC_OWNERS, MemoryOwner
from mindspeed_rl.launch.job import Job
from mindspeed_rl.peers.copies import load
from mindspeed_rl.peers.saving import decide, keep_checkpoints
from mindspeed_rl.planning.run_plan import RLPlan
from mindspeed_rl.rl.components import Components, RunState
from mindspeed_rl.rl.expert_placement import retarget
from mindspeed_rl.rl.report import RunReporter
from mindspeed_rl.rollout.saved_drafts import restore_drafts, save_drafts
from mindspeed_rl.samples.saved_responses import carryover_state, restored_carryover
from mindspeed_rl.samples.store import SampleStore
from mindspeed_rl.trainer_state import run_checkpoint
from mindspeed_rl.trainer_state.checkpoint import LoadedState

# Rewards of open responses and of those that abstain are NaN, and with them what is reported.
_MAY_BE_NAN = ("reward", "parts", "report")


def start(
    run: Components, job: Job[RLRunConfig, RLPlan] | None = None
) -> tuple[RunState, RunReporter]:
    """Return the state and report to continue from: ``--load``'s or new. Collective: the world.

    The engine has no weights yet, so the first sync copies the restored weights to it, whatever
    their version. A replay starts from a checkpoint before its step.

    Args:
        run: Parts of the run.
        job: Job whose flags say what to load; ``None``: that of the run.

    Raises:
        UsageError: the prompts are not those of the checkpoint, this run cannot take over the
            groups that it carries, its numbers are not finite, or there is none before the step of
            a replay.
    """
    run.scheduler.require(Phase.TRAIN, "load")
    job = job or run.job
    state = RunState.at_start(run.config, run.data.train)
    with run.scheduler.onloaded(*CRITIC_OWNERS, MemoryOwner.REFERENCE):
        companions = run.models.companions(run.config.rl.ref_update_interval)
        replayed = run.config.replay.step if run.config.replay.active else 1
        before = replayed if replayed > 1 else None  # the first step starts as in the run
        loaded = load(run.peers, job, run.models.policy, companions, before)
    extra = loaded.extra
    if before is not None and not loaded.step:
        raise UsageError(
            f"--replay {before}: {run.config.checkpoint.load} has no checkpoint of an earlier "
            "step; replay a step after its first checkpoint, or step 1, which needs none"
        )
    if not extra:
        return state, RunReporter(run, state)
    same_prompts = state.sampler.fingerprint == extra["sampler"]["fingerprint"]
    _refuse_record(run.config, loaded, same_prompts)
    _restore(run, state, loaded, same_prompts)
    run.weight_sync.weights_replaced()
    restore_drafts(run, str(job.config.checkpoint.load or job.config.checkpoint.save))
    return state, RunReporter(run, state, loaded.step, extra["report"])


def _restore(run: Components, state: RunState, loaded: LoadedState, same_prompts: bool) -> None:
    """Put the record of a checkpoint into the state of a run. Collective: the world.

    Raises:
        UsageError: The prompts are not those of the checkpoint, or this run cannot take over the
            groups that it carries.
    """
    extra = loaded.extra
    if same_prompts:
        # First, as an epoch that the sampler begins may be ordered by them.
        state.lengths.load_state_dict(extra["lengths"])
    state.sampler.load_state_dict(
        extra["sampler"], allow_changed_data=run.config.checkpoint.allow_changed_data
    )
    state.step, state.version = loaded.step, extra["version"]
    if run.config.balance.moves_experts:
        state.layer_experts = tuple(
            (n, tuple(slots)) for n, slots in extra.get("layer_experts", ())
        )
        retarget(run, state)
    if run.config.kl.rl_kl_target:
        state.kl_beta = extra["kl_beta"]
    state.rollbacks = tuple(extra.get("rollbacks", ()))
    if "gradients" in extra:
        state.gradients = GradientWatch.from_state(extra["gradients"])
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


def _refuse_record(config: RLRunConfig, loaded: LoadedState, same_prompts: bool) -> None:
    """Raise a UsageError unless a run may continue or replay what a checkpoint recorded. Local."""
    if wrong := nonfinite_numbers(loaded.extra, _MAY_BE_NAN):
        raise UsageError(
            f"--load {config.checkpoint.load}: in the record of step {loaded.step} "
            f"{wrong[0]}; move this checkpoint away to resume from an earlier one"
        )
    if config.replay.active and not same_prompts:
        raise UsageError(
            f"--replay {config.replay.step}: the prompts or the tokenizer are not those of the "
            "run, or not as they were; give its --prompt-data with the same content"
        )


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


def save_if_due(run: Components, state: RunState, report: RunReporter) -> str:
    """Save the state after the step when the flags, or the end of the run, ask for it. Collective.

    Returns:
        Why the run ends after this step; empty while it goes on.

    Raises:
        FloatingPointError: The state of the run or of its models is not finite; nothing is saved.
    """
    run_checkpoint.finish_writing(run.job, run.writer)
    due = decide(run.job, run.save_clock, state.step)
    if run.peers is not None and run.peers.is_due(state.step) and not due.stop:
        with _state_to_keep(run, state, report) as (extra, companions):
            run.peers.take(state.step, {"": run.models.policy, **companions}, extra)
    if due.save:
        _save(run, state, report)
        run.save_clock.end_save()
        if due.stop:
            finish_saves(run)
        keep_checkpoints(run.job, run.telemetry.logger)
    return due.stop


def _save(run: Components, state: RunState, report: RunReporter) -> None:
    with _state_to_keep(run, state, report) as (extra, companions):
        run_checkpoint.save(run.job, run.models.policy, state.step, extra, companions, run.writer)
        save_drafts(run, str(run.config.checkpoint.save))


@contextmanager
def _state_to_keep(run: Components, state: RunState, report: RunReporter) -> Iterator[Any]:
    """Bring to the devices what a checkpoint holds; give its record and companions. Collective."""
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
        "gradients": state.gradients.state_dict(),
        "rollbacks": list(state.rollbacks),
        "layer_experts": [[layer, list(slots)] for layer, slots in state.layer_experts],
        "report": report.state_dict(),
    }
    if wrong := nonfinite_numbers(extra, _MAY_BE_NAN):
        raise FloatingPointError(
            f"--save {run.config.checkpoint.save}: step {state.step} is not saved, in its record "
            f"{wrong[0]}; earlier checkpoints are untouched"
        )
    companions = run.models.companions(run.config.rl.ref_update_interval)
    # A reference that is not saved would only take memory beside what a save gathers.
    reference = (MemoryOwner.REFERENCE,) if "reference" in companions else ()
    with run.phase("save"), run.scheduler.onloaded(*CRITIC_OWNERS, *reference):
        yield extra, companions


def finish_saves(run: Components) -> None:
    """Wait for the checkpoint that is being written, if there is one. Collective: the world.

    Raises:
        OSError: It could not be written.
    """
    if run.writer is not None:
        with run.phase("save"):
            run_checkpoint.finish_writing(run.job, run.writer, wait=True)
