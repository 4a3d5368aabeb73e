"""Checks a whole configuration and plans its run, before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_rl.adapters.plan import check_adapters
from mindspeed_rl.config import (
    ModelConfig,
    ParallelConfig,
    PretrainRunConfig,
    RLRunConfig,
    ScoreRunConfig,
    TrainingRunConfig,
)
from mindspeed_rl.config.architecture import check_architecture, model_config
from mindspeed_rl.config.diagnostics import check_alarms, check_profiler, check_trackers
from mindspeed_rl.config.environment import BUILT_IN_ENVIRONMENTS
from mindspeed_rl.config.kernels import check_expert_modules, module_names
from mindspeed_rl.config.layouts import engine_layout, training_layout
from mindspeed_rl.config.needs import check_needs
from mindspeed_rl.config.outputs import check_output_file, check_paths
from mindspeed_rl.config.reward_spec import check_name
from mindspeed_rl.config.rewards import check_rewards
from mindspeed_rl.config.rl import eval_flag
from mindspeed_rl.config.rollout import EngineTuningConfig
from mindspeed_rl.config.supervised import check_indexed_data
from mindspeed_rl.config.training import CheckpointConfig, TrainConfig, check_recompute
from mindspeed_rl.core.agents import AGENT_FLAG
from mindspeed_rl.core.data_source import ALLOWED, DataSource
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout, round_up
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.expert_placement.near_trainer import placed_near_trainer
from mindspeed_rl.flag_checks.algorithms import check_algorithms
from mindspeed_rl.flag_checks.deltas import check_deltas
from mindspeed_rl.flag_checks.reference_pass import check_reference_pass
from mindspeed_rl.models.hf_files import check_tokenizer_files, find_weights
from mindspeed_rl.models.registry import spec_from_hf_config, value_spec_from_hf_config
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.planning.cost import SequenceCost
from mindspeed_rl.planning.micro_batches import (
    PackingRules,
    check_hybrid_context,
    packing_rules,
)
from mindspeed_rl.weights.layouts.megatron import MegatronLayout
from mindspeed_rl.weights.layouts.rollout import RolloutLayout


@dataclass(frozen=True, slots=True)
class BatchArithmetic:
    """The numbers of samples and updates that follow from the batch flags of an RL run."""

    prompts: int
    group_size: int
    samples: int
    samples_per_update: int
    updates_per_iteration: int
    iterations: int

    @property
    def updates(self) -> int:
        """Number of optimizer steps of one RL step."""
        return self.updates_per_iteration * self.iterations

    @property
    def on_policy(self) -> bool:
        """Whether every sample is trained on by the policy that sampled it."""
        return self.updates == 1

    def lines(self, dp: int, replicas: int) -> list[str]:
        """Describe the arithmetic, for the log at the start of a run."""
        verdict = (
            "on-policy: one optimizer step per rollout batch, ratio 1"
            if self.on_policy
            else f"off-policy within a step: {self.updates} optimizer steps per rollout batch"
        )
        return [
            f"samples/step {self.samples} = {self.prompts} prompts x {self.group_size} samples",
            f"optimizer steps/step {self.updates} of {self.samples_per_update} samples "
            f"({self.samples_per_update / dp:g} per data-parallel rank)",
            f"rollouts: {replicas} engines, {self.samples / replicas:g} samples each",
            verdict,
        ]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The spec and the training layouts that follow from a configuration alone."""

    spec: ModelSpec
    parallel: ParallelLayout
    megatron: MegatronLayout


@dataclass(frozen=True, slots=True)
class ScorePlan(RunPlan):
    """A :class:`RunPlan` with the layout of the scoring engine."""

    rollout_layout: RolloutLayout


@dataclass(frozen=True, slots=True)
class RLPlan(RunPlan):
    """A :class:`RunPlan` with the engines, the batch, and further models of an RL run."""

    engine: EngineLayout
    rollout_layout: RolloutLayout
    batch: BatchArithmetic
    max_model_len: int
    critic: MegatronLayout | None = None
    reward_model: MegatronLayout | None = None
    teachers: Mapping[str, MegatronLayout] = field(default_factory=dict)

    @property
    def readers(self) -> list[MegatronLayout]:
        """Layouts of the models that only compute, but for the reference."""
        return [*([self.reward_model] if self.reward_model else []), *self.teachers.values()]


def draws_weights(config: TrainingRunConfig | ScoreRunConfig) -> bool:
    """Whether weights are drawn at random instead of read from a checkpoint."""
    return isinstance(config, RLRunConfig) and config.benchmark.active


def longest_sequence(config: TrainingRunConfig | ScoreRunConfig, plan: RunPlan) -> int:
    """Return the tokens of the longest sequence of a run; 0: its flags do not say."""
    if isinstance(plan, ScorePlan):
        return 0  # given sequences are as long as the model allows
    return plan.max_model_len if isinstance(plan, RLPlan) else config.train.seq_length


def needs_equal_lengths(config: TrainingRunConfig | ScoreRunConfig, plan: RunPlan) -> bool:
    """Whether the micro-batches of an optimizer step need one length.

    The dispatcher that gathers the tokens of all ranks takes equally many from each, and all models
    of a run have the same micro-batches.
    """
    models = [plan.megatron]
    if isinstance(plan, RLPlan):
        models += [*([plan.critic] if plan.critic else []), *plan.readers]
    gathers = config.kernels.moe_token_dispatcher_type == "allgather"
    return gathers and any(model.spec.moe is not None for model in models)


def run_packing(config: TrainingRunConfig | ScoreRunConfig, plan: RunPlan) -> PackingRules:
    """Return the rules that make the micro-batches of a run. Pure."""
    return packing_rules(
        config.train,
        plan.parallel,
        longest_sequence(config, plan),
        sequence_parallel=config.parallel.shards_sequence,
        equal_lengths=needs_equal_lengths(config, plan),
        cost=SequenceCost.of_model(plan.spec),
        lockstep=plan.spec.moe is not None and plan.parallel.ep > 1,
        tokens_per_rank=config.parallel.max_seqlen_per_dp_cp_rank,
    )


def plan_rl(config: RLRunConfig, world: int, *, files: bool = True) -> RLPlan:
    """Check an RL configuration for ``world`` ranks, with ``files`` also its files, and plan it.

    Raises:
        UsageError: A flag is wrong; names it, its value, what is allowed and the fix.
    """
    _check_rl_flags(config, world, files)
    config.chat.check(config.prompts.apply_chat_template)
    base = plan_training(config, world, files)
    limit = config.prompts.max_prompt_length + config.rollout.rollout_max_response_length
    _check_rl_model(config, base.spec, limit, files)
    engine = engine_layout(config.rollout, world)
    batch = batch_arithmetic(config, base.parallel.dp)
    rollout = engine_provider().layout(base.spec, engine, config.engine)
    rollout = _with_placed_experts(config, base.megatron, rollout)
    _check_rollout_share(batch, engine)
    check_reference_pass(config, base.parallel, engine)
    check_adapters(base.megatron, config.lora)
    critic = reward_model = None
    if config.has_critic:
        source = (config.critic.critic_hf_checkpoint, "--critic-hf-checkpoint")
        critic = other_layout(config, base.spec, world, source, files=files)
    if scorer := config.rewards.reward_model_hf_checkpoint:
        source = (scorer, "--reward-model-hf-checkpoint")
        reward_model = other_layout(config, base.spec, world, source, files=files)
    teachers = {
        name: other_layout(
            config,
            base.spec,
            world,
            (teacher, "--teacher-hf-checkpoint"),
            spec_from_hf_config,
            files=files,
        )
        for name, teacher in config.distillation.teachers.items()
    }
    if config.distillation.full:
        _check_equal_shards(base.megatron, teachers)
    return RLPlan(
        base.spec, base.parallel, base.megatron, engine, rollout, batch, limit, critic,
        reward_model, teachers,
    )  # fmt: skip


def _check_equal_shards(policy: MegatronLayout, teachers: Mapping[str, MegatronLayout]) -> None:
    """Check that each rank has the same ids of the policy's and of every teacher's vocabulary.

    Raises:
        UsageError: They are cut at other ids.
    """
    for name, teacher in teachers.items():
        rows = [
            round_up(layout.spec.vocab_size, layout.vocab_multiple) for layout in (policy, teacher)
        ]
        if policy.parallel.tp > 1 and rows[0] != rows[1]:
            raise UsageError(
                f"--teacher-kl full: the vocabulary of teacher {name or 'one'} has {rows[1]} rows "
                f"with padding and the policy's {rows[0]}, so tensor-parallel ranks would compare "
                f"other tokens; set --make-vocab-size-divisible-by so that both are padded to one "
                "size, or use --teacher-kl sampled"
            )


def _with_placed_experts(
    config: RLRunConfig, trainer: MegatronLayout, rollout: RolloutLayout
) -> RolloutLayout:
    """Return the rollout layout with its experts where ``--rollout-expert-placement`` wants them.

    Raises:
        UsageError: The engine does not spread experts, or a file says where they are.
    """
    placement = config.balance.rollout_expert_placement
    if placement == "linear":
        return rollout
    given = f"--rollout-expert-placement {placement}"
    if not rollout.engine.expert_parallel:
        raise UsageError(
            f"{given}: needs experts that are spread over the ranks of an engine; set --rollout-ep "
            f"to --rollout-tp x --rollout-dp ({rollout.engine.size}) if that is above 1, or remove "
            "the flag"
        )
    if rollout.physical_experts:
        raise UsageError(
            f"{given}: --rollout-expert-map says already where experts are; remove one of the two"
        )
    return placed_near_trainer(trainer, rollout)


def is_first_old_pass_free(config: RLRunConfig, iterations: int) -> bool:
    """Whether the first optimizer step of a batch computes its old log-probs itself.

    So it does on-policy, unless samples are used several times or something needs the log-probs
    before the update.
    """
    needed_early = config.kl.rl_kl_in_reward or config.policy_loss.loss.selects
    return config.rl.old_logprob == "on-policy" and iterations == 1 and not needed_early


def check_engine(config: object, plan: object, platform: str) -> None:
    """Refuse what the rollout engine of a platform cannot do, in a start and in its dry run. Local.

    Runs without rollouts pass.

    Args:
        config: Configuration of the run.
        plan: Plan of the run.
        platform: ``"cpu"``, ``"cuda"`` or ``"npu"``.

    Raises:
        UsageError: A flag or the model is refused; names it, and what to use.
    """
    if isinstance(config, RLRunConfig) and isinstance(plan, RLPlan):
        engine_provider().check_run(config, platform)
        engine_provider().check_build(config, plan.rollout_layout, platform)


def _check_rl_flags(config: RLRunConfig, world: int, files: bool) -> None:
    """Check what flags alone say, and with ``files`` the files that they name."""
    engine_provider().check_options(config.engine_options)
    check_algorithms(config)
    check_deltas(config)
    _check_sampling(config)
    if files:
        if not config.benchmark.active:
            for text in config.prompts.blend.prefixes or ("",):
                _need_data("--prompt-data", text)
        for name, text in config.prompts.eval_files.items():
            _need_data(eval_flag(name), text)
        check_paths(config)
        check_trackers(config.trackers)
    check_alarms(config.alarms, config.rewards, config.checkpoint)
    check_profiler(config.profiler, world)
    _check_dropout(config.model)
    _check_steps(config.train, config.prompts.epochs, rl=True)
    environment = config.environment.rl_environment
    check_rewards(config.rewards, config.logging.phase_limit_s, config.partner, files=files)
    if environment:
        check_name("--rl-environment", environment, BUILT_IN_ENVIRONMENTS, files=files)
    if config.agent.rl_agent:
        check_name(AGENT_FLAG, config.agent.rl_agent, (), files=files)


def _check_rl_model(config: RLRunConfig, spec: ModelSpec, limit: int, files: bool) -> None:
    """Check the flags against the model; the longest sequence has ``limit`` tokens."""
    if files:
        _check_tokenizer(config.model)
    _check_mtp(config.checkpoint, config.model, spec)
    if config.rl.rl_routing_replay != "none" and not spec.expert_layers:
        raise UsageError(
            f"--rl-routing-replay {config.rl.rl_routing_replay}: the model has no experts; "
            "remove it"
        )
    _check_length(limit, config, spec)
    _check_kv_cache(limit, config, spec)


def _check_sampling(config: RLRunConfig) -> None:
    """Refuse sampling flags that change the distribution which the loss assumes."""
    rl = config.rl
    if rl.rl_default_top_p not in (0.0, 1.0) or rl.rl_default_top_k not in (0, -1):
        raise UsageError(
            f"--rl-default-top-p {rl.rl_default_top_p} --rl-default-top-k {rl.rl_default_top_k}: "
            "truncated sampling renormalises the engine's log-probs and biases the update; "
            "allowed: top-p 1, top-k -1"
        )


def plan_score(config: ScoreRunConfig, world: int) -> ScorePlan:
    """Validate a scoring configuration for ``world`` ranks, and plan it.

    Raises:
        UsageError: A flag is wrong; names it, its value, what is allowed and the fix.
    """
    score = config.score
    check_needs(config)
    engine_provider().check_options(config.engine_options)
    _need_file("--tokens", score.tokens, "an .npz file")
    if not score.output:
        raise UsageError("--output is required: give the .npz file to write")
    check_output_file("--output", score.output)
    if score.temperature != 1 and score.backend == "engine":
        raise UsageError(
            f"--temperature {score.temperature} with --backend engine: engines score prompts "
            "without temperature; allowed: 1"
        )
    base = plan_training(config, world)
    engine = engine_layout(config.rollout, world)
    rollout = engine_provider().layout(base.spec, engine, EngineTuningConfig())
    return ScorePlan(base.spec, base.parallel, base.megatron, rollout)


def batch_arithmetic(config: RLRunConfig, dp: int) -> BatchArithmetic:
    """Compute samples and updates of a step, and check that they divide evenly."""
    rl, train = config.rl, config.train
    samples = rl.grpo_prompts_per_step * rl.grpo_group_size
    per_update = train.global_batch_size or samples
    if samples % per_update:
        raise UsageError(
            f"--global-batch-size {per_update} does not divide the {samples} samples of a step "
            f"(--grpo-prompts-per-step {rl.grpo_prompts_per_step} x --grpo-group-size "
            f"{rl.grpo_group_size}); allowed: its divisors, or 0 for all of them"
        )
    if per_update % dp:
        what = f"--global-batch-size {per_update}"
        if not train.global_batch_size:
            what = (
                f"the {samples} samples of --grpo-prompts-per-step {rl.grpo_prompts_per_step} x "
                f"--grpo-group-size {rl.grpo_group_size}"
            )
        raise UsageError(
            f"{what}: not a multiple of the data-parallel size {dp}; give a multiple, or raise a "
            "parallel size so that fewer replicas share the samples"
        )
    return BatchArithmetic(
        prompts=rl.grpo_prompts_per_step,
        group_size=rl.grpo_group_size,
        samples=samples,
        samples_per_update=per_update,
        updates_per_iteration=samples // per_update,
        iterations=rl.grpo_iterations,
    )


def plan_pretrain(config: PretrainRunConfig, world: int, *, files: bool = True) -> RunPlan:
    """Validate a supervised configuration for ``world`` ranks, with ``files`` also its files.

    Raises:
        UsageError: A flag is wrong; names it, its value, what is allowed and the fix.
    """
    check_needs(config)
    if files and config.sft.stage == "pretrain":
        check_indexed_data(config.indexed, config.train.seq_length)
    elif files:
        _check_sft_data(config)
    config.chat.check(config.sft.apply_chat_template)
    _check_steps(config.train)
    if files:
        check_paths(config)
        check_trackers(config.trackers)
    check_profiler(config.profiler, world)
    base = plan_training(config, world, files)
    if files and config.sft.stage == "sft":
        _check_tokenizer(config.model)
    _check_mtp(config.checkpoint, config.model, base.spec)
    if config.train.seq_length > base.spec.max_position_embeddings:
        raise UsageError(
            f"--seq-length {config.train.seq_length} exceeds the model's max_position_embeddings "
            f"{base.spec.max_position_embeddings}; lower it"
        )
    if config.train.global_batch_size < 1 or config.train.global_batch_size % base.parallel.dp:
        raise UsageError(
            f"--global-batch-size {config.train.global_batch_size}: must be a positive multiple "
            f"of the data-parallel size {base.parallel.dp}"
        )
    return base


def _check_sft_data(config: PretrainRunConfig) -> None:
    if config.indexed.data_path and not config.sft.sft_data:
        raise UsageError(
            "--data-path without --stage pretrain: with --stage sft the data is --sft-data; add "
            "one of the two"
        )
    _need_data("--sft-data", config.sft.sft_data)


def _check_tokenizer(model: ModelConfig) -> None:
    if model.tokenizer_name_or_path:
        check_tokenizer_files(model.tokenizer_name_or_path, "--tokenizer-name-or-path")
    else:
        check_tokenizer_files(model.hf_checkpoint, "--hf-checkpoint")


def _check_mtp(checkpoint: CheckpointConfig, model: ModelConfig, spec: ModelSpec) -> None:
    if checkpoint.keep_mtp and not spec.num_mtp_layers:
        raise UsageError(
            f"--keep-mtp: {model.hf_checkpoint}/config.json has no multi-token-prediction layers "
            "(num_nextn_predict_layers); remove the flag"
        )


def _check_steps(train: TrainConfig, epochs: float = 0.0, *, rl: bool = False) -> None:
    if epochs and train.train_iters:
        raise UsageError(
            f"--epochs {epochs:g} and --train-iters {train.train_iters} exclude each other; give "
            "one of them"
        )
    if train.train_iters < 1 and not epochs:
        raise UsageError(
            "--train-iters is required: give the number of steps, at least 1"
            + (", or --epochs" if rl else "")
        )


def _check_dropout(model: ModelConfig) -> None:
    """Refuse dropout in RL, because the engine samples without dropout."""
    for name, rate in (
        ("--hidden-dropout", model.hidden_dropout),
        ("--attention-dropout", model.attention_dropout),
    ):
        if rate:
            raise UsageError(
                f"{name} {rate:g}: RL allows 0 only; the engine samples without dropout, so the "
                "ratio and the trainer/engine mismatch would measure dropout instead of learning; "
                "remove the flag"
            )


def _check_length(limit: int, config: RLRunConfig, spec: ModelSpec) -> None:
    prompt, response = (
        config.prompts.max_prompt_length,
        config.rollout.rollout_max_response_length,
    )
    if 0 < config.train.seq_length < limit:
        raise UsageError(
            f"--max-prompt-length {prompt} + --rollout-max-response-length {response} exceeds "
            f"--seq-length {config.train.seq_length}; raise --seq-length or lower one of the two"
        )
    if limit > (positions := engine_provider().positions(spec)):
        raise UsageError(
            f"sequences of up to {limit} tokens exceed the {positions} positions that the engine "
            f"has for a {spec.rope.kind} model of max_position_embeddings "
            f"{spec.max_position_embeddings}; lower --max-prompt-length or "
            "--rollout-max-response-length"
        )


def _need_file(name: str, value: str, kind: str) -> None:
    if not value:
        raise UsageError(f"{name} is required: give {kind}")
    if not Path(value).is_file():
        raise UsageError(f"{name} {value}: no such file; give {kind}")


def _need_data(name: str, value: str) -> None:
    if not value:
        raise UsageError(f"{name} is required: give {ALLOWED}")
    DataSource.parse(value, name)


def _check_kv_cache(limit: int, config: RLRunConfig, spec: ModelSpec) -> None:
    """Check that a sequence of ``limit`` tokens fits the cache, earlier than the engine does."""
    rollout = config.rollout
    tp = rollout.rl_inference_tensor_model_parallel_size
    token_bytes = spec.cached_values(tp) * (2 if rollout.engine_is_bf16(config.train) else 4)
    needed_gb = limit * token_bytes / 2**30
    if 0 < rollout.rollout_kv_cache_gb < needed_gb:
        raise UsageError(
            f"--rollout-kv-cache-gb {rollout.rollout_kv_cache_gb:g}: one sequence of {limit} "
            f"tokens needs {needed_gb:.3g} GiB per rank; raise it, leave it out so that the run "
            "chooses, or lower --max-prompt-length, --rollout-max-response-length or --seq-length"
        )


def plan_training(
    config: RLRunConfig | PretrainRunConfig | ScoreRunConfig, world: int, files: bool = True
) -> RunPlan:
    """Plan the training layout of a model, with ``files`` also checking that weights exist.

    Raises:
        UsageError: A flag is wrong; names it, its value, what is allowed and the fix.
    """
    model, parallel, train = config.model, config.parallel, config.train
    if not model.hf_checkpoint:
        raise UsageError("--hf-checkpoint is required: give a Hugging Face model directory")
    if train.lr_warmup_iters and train.lr_warmup_fraction:
        raise UsageError(
            f"--lr-warmup-iters {train.lr_warmup_iters} and --lr-warmup-fraction "
            f"{train.lr_warmup_fraction:g} exclude each other; give one of them"
        )
    check_recompute(train)
    checkpoint = model.hf_checkpoint
    spec = spec_from_hf_config(model_config(checkpoint, "--hf-checkpoint", files=files))
    if files and not draws_weights(config):
        find_weights(checkpoint)
    check_architecture(model, spec, parallel.tensor_model_parallel_size)
    gathers = spec.moe is not None and config.kernels.moe_token_dispatcher_type == "allgather"
    check_hybrid_context(train, parallel, gathers=gathers)
    megatron = _megatron_layout(model, parallel, spec, world)
    return RunPlan(spec, megatron.parallel, megatron)


def _megatron_layout(
    model: ModelConfig, parallel: ParallelConfig, spec: ModelSpec, world: int
) -> MegatronLayout:
    layout = training_layout(model, parallel, spec, world)
    modules = module_names(model, parallel.platform)
    check_expert_modules(modules, parallel.platform, layout.tp, spec.moe is not None)
    return MegatronLayout(spec, layout, model.make_vocab_size_divisible_by, modules)


def _check_rollout_share(batch: BatchArithmetic, engine: EngineLayout) -> None:
    if batch.samples < engine.num_groups:
        raise UsageError(
            f"{batch.samples} samples per step for {engine.num_groups} rollout groups of "
            f"--rollout-tp {engine.tp} ranks: some would have none; raise --grpo-prompts-per-step "
            "or --rollout-tp"
        )


def other_layout(
    config: RLRunConfig,
    policy: ModelSpec,
    world: int,
    source: tuple[str, str],
    read: Callable[[Mapping[str, Any]], ModelSpec] = value_spec_from_hf_config,
    *,
    files: bool,
) -> MegatronLayout:
    """Return the layout of a critic, reward model or teacher, with the policy's parallel sizes.

    Args:
        config: Configuration of the run.
        policy: Spec of the policy.
        world: Number of ranks.
        source: Directory of the checkpoint (empty: the policy's), and the flag that names it.
        read: Makes the spec of its configuration; by default one with a value head.
        files: Whether weights are read later.

    Raises:
        UsageError: The model cannot be cut like the policy, has a smaller vocabulary, or lacks
            its weights.
    """
    checkpoint, flag = source
    model = config.model
    spec = read(model_config(checkpoint or model.hf_checkpoint, flag, files=files))
    if files and checkpoint and not draws_weights(config):
        find_weights(checkpoint, flag)
    if spec.vocab_size < policy.vocab_size:
        raise UsageError(
            f"{flag} {checkpoint}: a vocabulary of {spec.vocab_size}, the policy has "
            f"{policy.vocab_size} and its token ids are read by both; give a model with the "
            "tokenizer of the policy"
        )
    return _megatron_layout(model, config.parallel, spec, world)
