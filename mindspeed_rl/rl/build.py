"""Builds the parts of an RL run, in the order in which mistakes are cheapest to find."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rl.building.engine import (
    build_rollout_engine,
    build_weight_sync,
    draft_history,
    open_ledger,
    rollout_dtype,
    share_memory,
    watched,
    with_chosen_cache,
    with_installed_engine,
)
from mindspeed_rl.building.models import (
    batch_rules,
    build_models,
    initialize_parallel,
    load_tokenizer,
)
from mindspeed_rl.checkpoint.save_clock import SaveClock
from mindspeed_rl.colocation.scheduler import DeviceScheduler
from mindspeed_rl.config import PromptConfig, RLRunConfig
from mindspeed_rl.config.outputs import EVALUATIONS_FILE, ROLLOUTS_FILE
from mindspeed_rl.config.rl import eval_flag
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.ranks import rank_ranges
from mindspeed_rl.data.cache import RowCache
from mindspeed_rl.data.prompts import PromptDataset, blend, load_prompts
from mindspeed_rl.data.random_prompts import random_prompts
from mindspeed_rl.distillation.teachers import check_teachers
from mindspeed_rl.flag_checks.algorithms import check_algorithms
from mindspeed_rl.generation.assignment import EngineAssignment, rebalance_rules
from mindspeed_rl.generation.multi_turn import Environments
from mindspeed_rl.generation.partners import agent_opening, open_partners
from mindspeed_rl.generation.rollout_worker import RolloutWorker
from mindspeed_rl.generation.scoring import RewardFunctions
from mindspeed_rl.launch import attempt
from mindspeed_rl.launch.job import Job
from mindspeed_rl.launch.start_up import start_stage
from mindspeed_rl.metrics.jsonl import JsonlWriter
from mindspeed_rl.metrics.telemetry import named_phase, open_logger, open_timer
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.peers.copies import open_copies
from mindspeed_rl.planning.run_plan import RLPlan
from mindspeed_rl.rewards import RewardSpec
from mindspeed_rl.rewards.drawn import NAME as DRAWN
from mindspeed_rl.rewards.drawn import DrawnRewards
from mindspeed_rl.rewards.ray_pool import make_reward_pool
from mindspeed_rl.rewards.scoring import check_row_rewards
from mindspeed_rl.rl.components import Components, PromptData, Telemetry
from mindspeed_rl.rl.single_rows import build_tail
from mindspeed_rl.rollout.engine import InferenceEngine
from mindspeed_rl.samples.columns import Column, experts_column, response_columns
from mindspeed_rl.samples.device_cache import TensorCache
from mindspeed_rl.samples.store import SampleStore
from mindspeed_rl.trainer import parallel_state
from mindspeed_rl.trainer_state import run_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Number of new objects that starts a garbage collection: about what the samples of a step need.
_YOUNG_OBJECTS = 20_000
_TRIALS = 3  # prompts on which rewards are tried: one may be odd, several are a fault


def build_components(job: Job[RLRunConfig, RLPlan]) -> Components:
    """Build the parts of the run on this rank, which ends in phase TRAIN. Collective: the world."""
    job = with_chosen_cache(with_installed_engine(job))
    config, rank = job.config, job.world.rank
    tokenizer = load_tokenizer(config)
    stop_ids, layout = stop_token_ids(tokenizer, job.plan), job.plan.engine
    rewards = _reward_functions(job, tokenizer)
    leads = layout.tp_rank(rank) == 0
    environments = open_partners(
        config, tokenizer, stop_ids, layout.group_of(rank) if leads else None
    )
    data = _prompt_data(job, tokenizer)
    job = with_counted_steps(job, len(data.train))
    config = job.config
    if job.world.local_rank == 0:  # once per node is enough: a failure ends all ranks
        check_data(config, data)
        job.log_rank0(*check_teachers(config, data.train, tokenizer))
    if rank == 0:
        job.log_rank0(*rewards.trial(data.train[:_TRIALS]))
    logger = open_logger(config, rank)
    initialize_parallel(job)
    models = build_models(job)
    timer, profiler = open_timer(job)
    sharing = share_memory(job, models)
    sharing.leave_all()  # so that the engine is built with the device memory it will have
    drafts = draft_history(config)
    engine = build_rollout_engine(job, drafts)
    cache = TensorCache(job.platform.device)
    store = build_sample_store(job, data.train, cache)
    sync = build_weight_sync(job, models.policy)
    ledger = open_ledger(job, sharing, engine, cache, sync)
    phase = partial(named_phase, timer, job.watchdog)
    scheduler = DeviceScheduler(engine, phase, watched(job, sharing, ledger, sync))
    run = Components(
        job=job,
        data=data,
        models=models,
        rollouts=replace(
            build_rollout_worker(job, engine, rewards, environments, store, tokenizer),
            drafts=drafts,
        ),
        samples=store,
        scheduler=scheduler,
        weight_sync=sync,
        telemetry=Telemetry(
            timer=timer,
            profiler=profiler,
            ledger=ledger,
            logger=logger,
            dump=JsonlWriter(Path(config.logging.output_dir) / ROLLOUTS_FILE),
            evaluations=JsonlWriter(Path(config.logging.output_dir) / EVALUATIONS_FILE),
        ),
        writer=run_checkpoint.open_writer(config.checkpoint),
        tail=build_tail(job, models, store),
        save_clock=SaveClock(attempt.elapsed_s()),
        peers=open_copies(job),
    )
    scheduler.to_train()
    _freeze_objects()
    return run


def with_counted_steps(job: Job[RLRunConfig, RLPlan], num_prompts: int) -> Job[RLRunConfig, RLPlan]:
    """Return the job with the steps that ``--epochs`` makes of so many prompts. Local.

    Raises:
        UsageError: The warm-up of a critic takes all of them.
    """
    config, prompts = job.config, job.config.prompts
    if not prompts.epochs:
        return job
    steps = prompts.steps(num_prompts, config.rl.grpo_prompts_per_step)
    job.log_rank0(f"--epochs {prompts.epochs:g} over {num_prompts} prompts: {steps} steps")
    train = replace(config.train, train_iters=steps)
    config = replace(config, train=train, prompts=replace(prompts, epochs=0.0))
    check_algorithms(config)
    return replace(job, config=config)


def _freeze_objects() -> None:
    """Exempt the objects built so far from garbage collection, and collect less often."""
    gc.collect()
    gc.freeze()  # keeps each release of device memory from searching all these objects
    gc.set_threshold(_YOUNG_OBJECTS)  # tables of samples would trigger it every few ms


def build_sample_store(
    job: Job[RLRunConfig, RLPlan], prompts: PromptDataset, cache: TensorCache
) -> SampleStore:
    """Build the store that keeps the tokens of samples and moves them between ranks. Local."""
    config, plan = job.config, job.plan
    has_environment = bool(config.partner)
    # A model with experts counts on every stage how far their choices agree.
    stages = range(plan.parallel.pp) if plan.spec.moe else sorted({0, plan.parallel.pp - 1})
    return SampleStore(
        rank=job.world.rank,
        parallel=plan.parallel,
        engine=plan.engine,
        prompt_tokens=prompts.token_ids,
        rules=batch_rules(job),
        samples_per_update=plan.batch.samples_per_update,
        cache=cache,
        num_copies=1 if has_environment else plan.engine.tp,
        stages=tuple(stages),
        one_node=job.world.local_size == job.world.size,
        columns=response_columns(
            has_environment=has_environment,
            experts=_experts(job),
            early_passes=config.rl.tail_passes,
        ),
        drop_truncated=config.sampling.rl_overlong_filtering,
        group_along=parallel_state.group_along,
    )


def _experts(job: Job[RLRunConfig, RLPlan]) -> Column | None:
    """Return the column of the engine's expert choices; ``None`` unless they are replayed."""
    if job.config.rl.rl_routing_replay != "rollout":
        return None
    spec = job.plan.spec
    assert spec.moe is not None, "refused before the run"
    return experts_column(spec.num_experts, len(spec.expert_layers) * spec.moe.top_k)


def build_rollout_worker(
    job: Job[RLRunConfig, RLPlan],
    engine: InferenceEngine,
    rewards: RewardFunctions,
    environments: Environments | None,
    store: SampleStore,
    tokenizer: PreTrainedTokenizerBase,
) -> RolloutWorker:
    """Build the worker that generates and scores samples on this rank. Local."""
    config, plan = job.config, job.plan
    item = rollout_dtype(config.rollout, config.train).itemsize
    return RolloutWorker(
        engine=engine,
        assignment=EngineAssignment(
            engine=plan.engine,
            rank=job.world.rank,
            limit=config.rollout.rollout_max_response_length,
            partial_tokens=config.balance.partial_rollout_tokens,
            by_length=config.balance.rollout_balance == "history",
            rules=rebalance_rules(config, plan, engine.max_num_seqs, item),
        ),
        rewards=rewards,
        cache=store.cache,
        columns=store.columns,
        seed=config.train.seed,
        stop_token_ids=() if config.benchmark.active else stop_token_ids(tokenizer, plan),
        history_folder=Path(config.logging.output_dir) if job.world.rank == 0 else None,
        environments=environments,
    )


def _reward_specs(config: RLRunConfig) -> list[RewardSpec]:
    return [RewardSpec.parse(text) for text in config.rewards.reward_function]


def _reward_functions(
    job: Job[RLRunConfig, RLPlan], tokenizer: PreTrainedTokenizerBase
) -> RewardFunctions:
    """Build the reward functions, with workers on the first rank of each engine. Local."""
    specs = _reward_specs(job.config)
    leads = job.plan.engine.tp_rank(job.world.rank) == 0
    if job.config.benchmark.active:
        pool = DrawnRewards(job.config.train.seed) if leads else None
        return RewardFunctions((DRAWN,), pool, tokenizer)
    return RewardFunctions(
        names=tuple(spec.label for spec in specs),
        pool=make_reward_pool(job.config) if leads else None,
        tokenizer=tokenizer,
        in_conversation=bool(job.config.partner),
    )


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, plan: RLPlan) -> tuple[int, ...]:
    """Return the token ids that end a response: those of the config and of the tokenizer.

    Raises:
        UsageError: there is no such id, or the model has no embedding row for one.
    """
    ids = set(plan.spec.eos_token_ids)
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    if not ids:
        raise UsageError(
            "neither config.json (eos_token_id) nor the tokenizer (eos_token) names an "
            "end-of-sequence token, so no response would ever end; add one of them"
        )
    if max(ids) >= plan.spec.vocab_size:
        raise UsageError(
            f"end-of-sequence id {max(ids)} (tokenizer: {tokenizer.eos_token!r}) is outside the "
            f"vocabulary of {plan.spec.vocab_size} in config.json; the tokenizer is another "
            "model's, or lacks eos_token in tokenizer_config.json and fell back to a default"
        )
    return tuple(sorted(ids))


@start_stage("prompts")
def _prompt_data(job: Job[RLRunConfig, RLPlan], tokenizer: PreTrainedTokenizerBase) -> PromptData:
    """Load the data sets, the same on all ranks. Collective: the world.

    Raises:
        UsageError: A data set is broken, or ranks have other prompts.
    """
    config = job.config
    if config.benchmark.active:
        count, length = config.rl.grpo_prompts_per_step, config.prompts.max_prompt_length
        drawn = random_prompts(count, length, job.plan.spec.vocab_size, config.train.seed)
        return PromptData(tokenizer, drawn, {})
    cache = RowCache(
        config.prompts.prompt_cache_path,
        limit_s=config.logging.phase_limit_s,
        progress=job.world.rank == 0,
    )
    prompts, held_out = load_data(
        config.prompts, tokenizer, job.plan.spec, cache, config.chat.system_message
    )
    mine = {"--prompt-data": prompts.fingerprint}
    mine |= {eval_flag(name): dataset.fingerprint for name, dataset in held_out.items()}
    refuse_different_prompts(gather_objects(mine))
    if config.agent.rl_agent:
        first = agent_opening(tokenizer)
        prompts = prompts.opened(first)
        held_out = {name: dataset.opened(first) for name, dataset in held_out.items()}
    return PromptData(tokenizer, prompts, held_out)


def refuse_different_prompts(fingerprints: Sequence[Mapping[str, str]]) -> None:
    """Refuse prompts that are not the same on all ranks: each plans and trains with its own copy.

    Args:
        fingerprints: Per rank, flag -> fingerprint of its data set.

    Raises:
        UsageError: Some differ; the message names flag and ranks.
    """
    for flag, expected in fingerprints[0].items():
        other = [rank for rank, found in enumerate(fingerprints) if found[flag] != expected]
        if other:
            raise UsageError(
                f"{flag}: the prompts of ranks {rank_ranges(other)} differ from those of rank 0; "
                "give all nodes the same files, revision, tokenizer and time zone"
            )


def load_data(
    options: PromptConfig,
    tokenizer: PreTrainedTokenizerBase,
    spec: ModelSpec,
    cache: RowCache,
    system_message: str = "",
) -> tuple[PromptDataset, dict[str, PromptDataset]]:
    """Load the prompts to train on and the held-out sets by name. Local.

    Raises:
        UsageError: a data set is broken.
    """
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        max_prompt_length=options.max_prompt_length,
        vocab_size=spec.vocab_size,
        prompt_key=options.prompt_key,
        answer_key=options.answer_key,
        apply_chat_template=options.apply_chat_template,
        system_message=system_message,
        cache=cache,
    )
    parts = [load(text, flag="--prompt-data") for text in options.blend.prefixes]
    held_out = {name: load(text, flag=eval_flag(name)) for name, text in options.eval_files.items()}
    return blend(parts, options.blend.weights), held_out


def check_data(config: RLRunConfig, data: PromptData) -> None:
    """Check the prompts against each other and against the rewards of the run. Local.

    Raises:
        UsageError: a held-out prompt is also trained on, a row names rewards that the run does not
            have, or there is nothing to order.
    """
    per_step = config.rl.grpo_prompts_per_step
    if config.balance.prompt_order == "by-length" and len(data.train) <= per_step:
        raise UsageError(
            f"--prompt-order by-length: a step draws {per_step} prompts (--grpo-prompts-per-step) "
            f"and --prompt-data has {len(data.train)}, so every step has all lengths; remove it"
        )
    held_out = {} if config.prompts.eval_may_overlap else data.held_out
    for name, dataset in held_out.items():
        refuse_overlap(data.train, dataset, eval_flag(name))
    check_row_rewards(
        _reward_specs(config), [data.train, *data.held_out.values()], config.rewards.reward_key
    )


def refuse_overlap(prompts: PromptDataset, held_out: PromptDataset, flag: str) -> None:
    """Refuse held-out prompts that are also trained on, by digests of their token ids.

    Raises:
        UsageError: the message gives the number of common prompts, and one of them.
    """
    digests = held_out.digests()
    known = set(digests).intersection(prompts.digests())
    both = [row for row, digest in enumerate(digests) if digest in known]
    if both:
        raise UsageError(
            f"{flag} {held_out.source}: {len(both)} of {len(held_out)} prompts are also in "
            f"--prompt-data {prompts.source}, e.g. {held_out.text(both[0])!r}; remove them from "
            "one of the two, or add --eval-may-overlap"
        )
