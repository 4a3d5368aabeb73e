"""Builds the models of a run: process groups, weights, optimizers, and the rules for batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_rl.adapters.base_model import BaseModel
from mindspeed_rl.algorithms.distillation import TEACHER_FLAG
from mindspeed_rl.checkpoint.hf import check_shapes, weight_files
from mindspeed_rl.checkpoint.names import mtp_tensors
from mindspeed_rl.checkpoint.random_weights import draw_weights
from mindspeed_rl.config import RLRunConfig, TrainConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.memory import LOAD_BUFFER_BYTES
from mindspeed_rl.data.tokenizer import read_tokenizer
from mindspeed_rl.distillation.heads import install_heads
from mindspeed_rl.launch.job import Job
from mindspeed_rl.launch.start_up import start_stage
from mindspeed_rl.model_files.loading import load_by_node
from mindspeed_rl.models.blocks import VALUE_HEAD
from mindspeed_rl.parallel.groups import check_equal_nodes
from mindspeed_rl.planning.run_plan import RLPlan, draws_weights, run_packing
from mindspeed_rl.samples.placement import BatchRules
from mindspeed_rl.trainer import parallel_state
from mindspeed_rl.trainer.train_engine import TrainEngine
from mindspeed_rl.weight_layouts.base import TableLayout
from mindspeed_rl.weight_layouts.megatron import MegatronLayout
from mindspeed_rl.weights.transports import make_transport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mindspeed_rl.config import PretrainRunConfig
    from mindspeed_rl.planning.run_plan import RunPlan


@dataclass(frozen=True)
class Models:
    """The models that megatron-core runs; ``None`` for a model that the run does not have."""

    policy: TrainEngine
    reference: TrainEngine | BaseModel | None = None
    critic: TrainEngine | None = None
    reward_model: TrainEngine | None = None
    teachers: Mapping[str, TrainEngine] = field(default_factory=dict)

    def refresh_reference(self) -> None:
        """Make the weights of the reference those of the policy. Local; both on the device."""
        assert self.reference is not None and not isinstance(self.reference, BaseModel)
        present = self.policy.named_parameters()
        with torch.no_grad():
            for name, param in self.reference.named_parameters().items():
                param.copy_(present[name])
        self.reference.reload_master_weights()

    def companions(self, ref_update_interval: int) -> dict[str, TrainEngine]:
        """Return the models besides the policy that change, by role.

        Args:
            ref_update_interval: Number of steps after which the policy becomes the reference; 0:
                the reference never changes.
        """
        found = {"critic": self.critic} if self.critic is not None else {}
        reference = self.reference
        if ref_update_interval and reference and not isinstance(reference, BaseModel):
            found["reference"] = reference
        return found


@start_stage("models of the trainer")
def build_models(job: Job[RLRunConfig, RLPlan]) -> Models:
    """Build all models of an RL run with their first weights. Collective: the training grid.

    The reference gets the policy's, which are those of ``--hf-checkpoint`` here: those of
    ``--load`` come later (``resume.start``).
    """
    config, plan = job.config, job.plan
    updates = (config.train.train_iters - config.critic.critic_warmup_steps) * plan.batch.updates
    temperature = config.rl.rl_default_temperature
    policy = build_engine(job, "policy", updates, temperature, routing=_routing(job))
    reference: TrainEngine | BaseModel | None = None
    if config.rl.grpo_kl_beta and config.lora.is_on:
        reference = BaseModel(policy)
    elif config.rl.grpo_kl_beta:  # only the KL needs a reference
        reference = new_engine(
            job, "reference", plan.megatron, config.train, 0, temperature=temperature
        )
        Models(policy, reference).refresh_reference()
    return Models(
        policy, reference, build_critic(job), build_reward_model(job), build_teachers(job, policy)
    )


def _routing(job: Job[RLRunConfig, RLPlan]) -> str:
    """Return the policy's routing mode for passes after the first: see ``TrainEngine``."""
    if not job.plan.spec.moe:
        return "free"
    choice = job.config.rl.rl_routing_replay
    return {"none": "compare", "trainer": "replay", "rollout": "engine"}[choice]


def load_tokenizer(config: RLRunConfig | PretrainRunConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the run."""
    model = config.model
    own = model.tokenizer_name_or_path
    return read_tokenizer(
        model.tokenizer_directory,
        "--tokenizer-name-or-path" if own else "--hf-checkpoint",
        model=model.hf_checkpoint if own else "",
        trust_remote_code=model.trust_remote_code,
        switches=config.chat.switches,
    )


def build_engine(
    job: Job[Any, RunPlan],
    role: str,
    num_updates: int,
    temperature: float = 1.0,
    *,
    routing: str = "free",
) -> TrainEngine:
    """Build an engine with the weights of ``--hf-checkpoint``. Collective: the training grid."""
    train, layout = job.config.train, job.plan.megatron
    if not draws_weights(job.config):
        check_shapes(job.config.model.hf_checkpoint, layout, job.world.rank)
    how: dict[str, Any] = {"temperature": temperature, "routing": routing}
    if isinstance(job.config, RLRunConfig):
        how["lora"] = job.config.lora
    engine = new_engine(job, role, layout, train, num_updates, **how)
    if role == "policy":
        kept_mtp(job)  # refuses --keep-mtp without its tensors before the run, not after
    load_weights(job, layout, engine.named_parameters(), log_skipped=role == "policy")
    engine.reload_master_weights()
    return engine


def kept_mtp(job: Job[Any, RunPlan]) -> dict[str, Path]:
    """Return the tensors that ``--keep-mtp`` copies unchanged into every export, with their files.

    Raises:
        UsageError: The checkpoint has no multi-token-prediction layers.
    """
    if not job.config.checkpoint.keep_mtp:
        return {}
    checkpoint = job.config.model.hf_checkpoint
    files = weight_files(checkpoint)
    found = mtp_tensors(job.plan.spec, files)
    if not found:
        raise UsageError(
            f"--keep-mtp: {checkpoint} has no multi-token-prediction layers; remove the flag, or "
            "give a checkpoint that has them (num_nextn_predict_layers in config.json, and "
            "weights behind the last layer)"
        )
    return {name: files[name] for name in found}


def new_engine(
    job: Job[Any, RunPlan],
    role: str,
    layout: MegatronLayout,
    train: TrainConfig,
    num_updates: int,
    **how: Any,
) -> TrainEngine:
    """Build an engine with undefined weights. Collective: the training grid."""
    return TrainEngine(
        role,
        layout=layout,
        platform=job.platform,
        model=job.config.model,
        parallel=job.config.parallel,
        kernels=job.config.kernels,
        train=train,
        num_updates=num_updates,
        force_balance=draws_weights(job.config),
        **how,
    )


def load_weights(
    job: Job[Any, RunPlan],
    layout: TableLayout,
    params: Mapping[str, torch.Tensor],
    log_skipped: bool = True,
) -> None:
    """Fill ``params`` from ``--hf-checkpoint``; with ``log_skipped``, log what is left out.

    Collective: the world. In a throughput run the weights are drawn at random.

    Raises:
        UsageError: the weights do not fit the model.
    """
    if draws_weights(job.config):
        draw_weights(layout, job.world.rank, params, job.config.train.seed)
        return
    checkpoint = job.config.model.hf_checkpoint
    mtp = mtp_tensors(layout.spec, weight_files(checkpoint))
    if mtp and log_skipped:
        job.log_rank0(
            f"--hf-checkpoint {checkpoint}: left out are {len(mtp)} tensors of multi-token "
            f"prediction (layers: {layout.spec.num_mtp_layers})"
        )
    _load(job, checkpoint, layout, params, mtp, "--hf-checkpoint")


def _load(
    job: Job[Any, RunPlan],
    directory: str,
    layout: TableLayout,
    params: Mapping[str, torch.Tensor],
    left_out: Collection[str],
    flag: str,
) -> None:
    """Fill ``params`` from a checkpoint of which a node reads no byte twice. Collective: the world.

    Rows travel between hosts: a device has no room for them beside the model's state.
    """
    load_by_node(
        directory,
        layout,
        job.world.rank,
        params,
        ranks_per_node=job.world.local_size,
        transport=make_transport("p2p", job.world.size, torch.device("cpu")),
        buffer_bytes=LOAD_BUFFER_BYTES,
        left_out=left_out,
        flag=flag,
    )


@start_stage("process groups")
def initialize_parallel(job: Job[Any, RunPlan]) -> None:
    """Create the training grid's process groups. Collective: the world."""
    check_equal_nodes(job.world.local_size)
    parallel_state.initialize(job.plan.parallel, job.config.train.seed, job.timeout_minutes)


def batch_rules(job: Job[Any, RunPlan]) -> BatchRules:
    """Return the rules that make the micro-batches of this rank out of samples. Local."""
    at = job.plan.parallel.coords(job.world.rank)
    return BatchRules(run_packing(job.config, job.plan), at.dp, at.cp)


def build_critic(job: Job[RLRunConfig, RLPlan]) -> TrainEngine | None:
    """Build the critic; ``None`` if the run has none. Collective: the training grid."""
    config, plan = job.config, job.plan
    if plan.critic is None:
        return None
    lr, checkpoint = config.critic.critic_lr, config.critic.critic_hf_checkpoint
    train = replace(config.train, lr=lr, min_lr=min(config.train.min_lr, lr))
    engine = new_engine(job, "critic", plan.critic, train, train.train_iters * plan.batch.updates)
    has_head = load_value_model(job, engine, checkpoint, "--critic-hf-checkpoint")
    head = "of the checkpoint" if has_head else "starts at 0"
    if draws_weights(config):
        head = "and all other weights drawn at random"
    job.log_rank0(
        f"critic: {checkpoint or config.model.hf_checkpoint}, value head {head}, lr {lr:g}"
    )
    return engine


def build_reward_model(job: Job[RLRunConfig, RLPlan]) -> TrainEngine | None:
    """Build the reward model; ``None`` if the run has none. Collective: the training grid.

    Raises:
        UsageError: the checkpoint has no value head.
    """
    layout, checkpoint = job.plan.reward_model, job.config.rewards.reward_model_hf_checkpoint
    if layout is None:
        return None
    engine = new_engine(job, "reward model", layout, job.config.train, 0)
    if not load_value_model(job, engine, checkpoint, "--reward-model-hf-checkpoint"):
        raise UsageError(
            f"--reward-model-hf-checkpoint {checkpoint}: no {VALUE_HEAD}, so it scores nothing; "
            "give a sequence classifier with one label"
        )
    job.log_rank0(f"reward model: {checkpoint}, weight {job.config.rewards.reward_model_weight:g}")
    return engine


def build_teachers(job: Job[RLRunConfig, RLPlan], policy: TrainEngine) -> dict[str, TrainEngine]:
    """Build the teachers of the run by name. Collective: the training grid."""
    config, found = job.config, dict[str, TrainEngine]()
    temperature = config.rl.rl_default_temperature
    for name, directory in config.distillation.teachers.items():
        role = f"teacher {name}".strip()
        engine = new_engine(
            job, role, job.plan.teachers[name], config.train, 0, temperature=temperature
        )
        load_other_model(job, engine, directory, TEACHER_FLAG)
        job.log_rank0(f"{role}: {directory}, weight {config.distillation.teacher_weight:g}")
        found[name] = engine
    if config.distillation.full:
        group = parallel_state.group_along("tp")
        assert group is not None
        install_heads(policy, found, group)
    return found


def load_value_model(
    job: Job[RLRunConfig, RLPlan], engine: TrainEngine, checkpoint: str, flag: str
) -> bool:
    """Load a checkpoint into an engine; a value head that it lacks is set to 0.

    Collective: the node.

    In a throughput run the weights are drawn at random, those of the head as well.

    Args:
        job: Job of the run.
        engine: Engine with a value head.
        checkpoint: Directory of the checkpoint; empty: the policy's.
        flag: Flag that names the checkpoint, for messages.

    Returns:
        Whether the checkpoint has a value head.

    Raises:
        UsageError: the weights do not fit the model.
    """
    directory = checkpoint or job.config.model.hf_checkpoint
    load_other_model(job, engine, directory, flag if checkpoint else "--hf-checkpoint")
    return draws_weights(job.config) or VALUE_HEAD in weight_files(directory)


def load_other_model(
    job: Job[RLRunConfig, RLPlan], engine: TrainEngine, directory: str, flag: str
) -> None:
    """Load a model besides the policy; in a throughput run draw its weights at random.

    Collective: the node.

    Raises:
        UsageError: the weights do not fit the model.
    """
    layout, rank, params = engine.layout, job.world.rank, engine.named_parameters()
    if draws_weights(job.config):
        draw_weights(layout, rank, params, job.config.train.seed)
    else:
        left_out = mtp_tensors(layout.spec, weight_files(directory))
        _load(job, directory, layout, params, left_out, flag)
    engine.reload_master_weights()
