"""Models with a value head beside the policy: how they are built."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.checkpoint.hf import load_hf, weight_files
from mindspeed_rl.checkpoint.names import mtp_tensors
from mindspeed_rl.config import RLRunConfig, TrainConfig
from mindspeed_rl.config.validate import RLPlan
from mindspeed_rl.launch.job import Job
from mindspeed_rl.models.blocks import VALUE_HEAD
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout
from mindspeed_rl.trainer.train_engine import TrainEngine


def build_critic(job: Job[RLRunConfig, RLPlan]) -> TrainEngine | None:
    """The critic with its first weights; ``None`` without one. Collective: the training grid."""
    config, plan = job.config, job.plan
    if plan.critic is None:
        return None
    lr, checkpoint = config.critic.critic_lr, config.critic.critic_hf_checkpoint
    train = replace(config.train, lr=lr, min_lr=min(config.train.min_lr, lr))
    engine = value_engine(job, "critic", plan.critic, train, train.train_iters * plan.batch.updates)
    has_head = load_value_model(job, plan.critic, engine, checkpoint, "--critic-hf-checkpoint")
    job.say(
        f"critic: {checkpoint or config.model.hf_checkpoint}, value head "
        f"{'of the checkpoint' if has_head else 'starts at 0'}, lr {lr:g}"
    )
    return engine


def build_reward_model(job: Job[RLRunConfig, RLPlan]) -> TrainEngine | None:
    """The reward model; ``None`` without one. Collective: the training grid.

    Raises:
        ValueError: its checkpoint has no value head.
    """
    layout, checkpoint = job.plan.reward_model, job.config.rewards.reward_model_hf_checkpoint
    if layout is None:
        return None
    engine = value_engine(job, "reward model", layout, job.config.train, 0)
    if not load_value_model(job, layout, engine, checkpoint, "--reward-model-hf-checkpoint"):
        raise ValueError(
            f"--reward-model-hf-checkpoint {checkpoint}: no {VALUE_HEAD}, so it scores nothing; "
            "give a sequence classifier with one label"
        )
    job.say(f"reward model: {checkpoint}, weight {job.config.rewards.reward_model_weight:g}")
    return engine


def value_engine(
    job: Job[RLRunConfig, RLPlan],
    role: str,
    layout: MegatronLayout,
    train: TrainConfig,
    num_updates: int,
) -> TrainEngine:
    """An engine with a value head, weights undefined. Collective: the training grid."""
    return TrainEngine(
        role,
        layout=layout,
        platform=job.platform,
        model=job.config.model,
        parallel=job.config.parallel,
        train=train,
        num_updates=num_updates,
    )


def load_value_model(
    job: Job[RLRunConfig, RLPlan],
    layout: MegatronLayout,
    engine: TrainEngine,
    checkpoint: str,
    flag: str,
) -> bool:
    """Fill an engine with a checkpoint; a head that it lacks becomes 0. Local.

    Args:
        job: of the run.
        layout: of the engine.
        engine: with a value head.
        checkpoint: its directory; empty: the policy's.
        flag: that names it.

    Returns:
        Whether the checkpoint has a value head.

    Raises:
        ValueError: weights that do not fit the model.
    """
    directory = checkpoint or job.config.model.hf_checkpoint
    files = weight_files(directory)
    left_out = mtp_tensors(layout.spec, files)
    params = engine.named_parameters()
    load_hf(
        directory,
        layout,
        job.world.rank,
        params,
        left_out=left_out,
        optional=(VALUE_HEAD,),
        flag=flag if checkpoint else "--hf-checkpoint",
    )
    engine.weights_changed()
    return VALUE_HEAD in files
