"""Copies the trainer's weights to the engine, and checks that the engine computes with them."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.colocation.scheduler import Phase
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.agreement import AgreementBounds, agreement_bounds, unlike_precisions
from mindspeed_rl.generation.rollout_worker import PassRequest
from mindspeed_rl.metrics.agreement import check_difference
from mindspeed_rl.metrics.metric_set import Mean, MetricSet, reduce_metrics
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.rl.components import Components, RunState
from mindspeed_rl.samples.device_cache import TensorCache
from mindspeed_rl.samples.rollout_info import SampleKey, exchange_table

PROBE_TOKENS = 24


def sync_weights(run: Components, version: int) -> MetricSet:
    """Copy the policy's weights to the engine and verify them, unless it has ``version`` already.

    Collective: the world; within SYNC.

    Returns:
        Bytes and speed of the latest transfer.

    Raises:
        RuntimeError: engine and trainer hold different bits.
    """
    run.scheduler.require(Phase.SYNC, "sync_weights")
    with run.phase("reshard"):
        run.weight_sync.run(run.rollouts.engine, version)
    return run.weight_sync.metrics


def bounds_of(config: RLRunConfig, spec: ModelSpec) -> AgreementBounds:
    """Return how far trainer and engine may be apart in a run."""
    trainer, engine = config.train.bf16, config.rollout.engine_is_bf16(config.train)
    return agreement_bounds(
        bf16=trainer or engine,
        unlike=unlike_precisions(trainer_bf16=trainer, engine_bf16=engine),
        experts=spec.moe is not None,
        latent_attention=spec.latent_attention,
        limit=config.rollout.rl_sync_check_tol,
    )


def check_engine(run: Components, state: RunState) -> float:
    """Compare log-probs of engine and trainer on one prompt per engine.

    Collective: the world; starts and ends in TRAIN.

    Returns:
        The mean |difference| over the sampled tokens.

    Raises:
        RuntimeError: it is above the limit of the run: ``--rl-sync-check-tol``.
    """
    run.scheduler.to_sync()
    sync_weights(run, state.version)
    run.scheduler.to_rollout()
    worker, store, engine = run.rollouts, run.samples, run.plan.engine
    prompts = [run.data.train[i % len(run.data.train)] for i in range(engine.num_groups)]
    settings = worker.settings(run.config.rl.rl_default_temperature)
    settings = replace(
        settings, max_response_tokens=min(PROBE_TOKENS, settings.max_response_tokens)
    )
    with run.phase("probe"):
        own = worker.generate(PassRequest(prompts, 0, settings, state.version))
        if run.config.balance.moves_experts:
            worker.engine.take_expert_load()  # a resumed run would count this probe once more
        known, copies = (own, []) if worker.assignment.leads_engine else ([], own)
        samples = exchange_table(
            known, engine.group_of(run.job.world.rank), (), engine.num_groups, SampleKey(0, 0),
            columns=store.columns, copies=copies, num_copies=engine.tp,
        )  # fmt: skip
        probe_store = replace(store, cache=TensorCache(store.cache.device))
        probe_store.keep(own, samples)
    run.scheduler.to_train()
    with run.phase("probe"):
        placed = probe_store.place(samples)
        policy = run.models.policy
        gaps = []
        for packed in probe_store.pack(placed):
            micro = policy.prepare(packed)
            for m, logp in zip(micro, policy.logprobs(micro), strict=True):
                if logp is not None:
                    gaps.append((logp - m.column("rollout_logprobs")).abs())
        mean = MetricSet({"probe": Mean(float(sum(g.sum() for g in gaps)), sum(map(len, gaps)))})
        gap = reduce_metrics(mean)["probe"]
    if warning := check_difference("probe", gap, bounds_of(run.config, run.plan.spec)):
        run.job.log_rank0(f"warning: {warning}")
    return gap
