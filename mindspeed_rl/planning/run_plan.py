"""Checks a whole configuration and plans its run, before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
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
from mindspeed_rl.config.kernels import check_expert_modules, module_names
from mindspeed_rl.config.layouts import engine_layout, training_layout
from mindspeed_rl.config.outputs import check_output_file
from mindspeed_rl.config.rollout import EngineTuningConfig
from mindspeed_rl.config.score import ScoreConfig
from mindspeed_rl.config.training import CheckpointConfig, check_recompute, check_warmup
from mindspeed_rl.core.errors import Mistakes, UsageError, check_each
from mindspeed_rl.core.installed import resolve_platform
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout, round_up
from mindspeed_rl.core.ranks import counted
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.expert_placement.near_trainer import placed_near_trainer
from mindspeed_rl.flag_checks.deltas import check_deltas_on
from mindspeed_rl.flag_checks.needs import check_needs
from mindspeed_rl.flag_checks.single_flags import (
    check_rl_flags,
    check_supervised_flags,
    need_file,
)
from mindspeed_rl.flag_checks.single_rows import check_single_rows
from mindspeed_rl.models.hf_files import check_tokenizer_files, find_weights
from mindspeed_rl.models.registry import spec_from_hf_config, value_spec_from_hf_config
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.packing.cost import SequenceCost
from mindspeed_rl.packing.micro_batches import (
    PackingRules,
    check_hybrid_context,
    packing_rules,
)
from mindspeed_rl.rollout.draft_model import FLAG, OPTION, cached_values, draft_model_of
from mindspeed_rl.weight_layouts.megatron import MegatronLayout
from mindspeed_rl.weight_layouts.rollout import RolloutLayout


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
            f"samples/step {self.samples} = {counted(self.prompts, 'prompt')} x "
            f"{counted(self.group_size, 'sample')}",
            f"optimizer steps/step {self.updates} of {self.samples_per_update} samples "
            f"({self.samples_per_update / dp:g} per data-parallel rank)",
            f"rollouts: {counted(replicas, 'engine')}, {self.samples / replicas:g} samples each",
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
    limit = config.prompts.max_prompt_length + config.rollout.rollout_max_response_length
    mistakes = Mistakes()
    with mistakes:
        engine_provider().check_options(config.engine_options)
    with mistakes:
        check_rl_flags(config, world, files=files)
    with mistakes:
        engine = engine_layout(config.rollout, world)
    with mistakes:
        base = plan_training(config, world, files, partial(_check_rl_model, config, limit, files))
        batch = batch_arithmetic(config, base.parallel.dp)
    with mistakes:
        check_each(*(partial(model_config, *m, files=files) for m in _other_models(config)))
    mistakes.report()
    with mistakes:
        rollout = engine_provider().layout(base.spec, engine, config.engine)
        rollout = _with_placed_experts(config, base.megatron, rollout)
    with mistakes:
        _check_rollout_share(batch, engine)
    with mistakes:
        check_single_rows(config, base.parallel, engine)
    with mistakes:
        check_adapters(base.megatron, config.lora, resolve_platform(config.parallel.platform))
    with mistakes:
        critic, reward_model, teachers = _other_layouts(config, base, world, files)
    mistakes.report()
    return RLPlan(
        base.spec, base.parallel, base.megatron, engine, rollout, batch, limit, critic,
        reward_model, teachers,
    )  # fmt: skip


def _other_models(config: RLRunConfig) -> list[tuple[str, str]]:
    """Return the directories of models besides the policy, with the flags that name them."""
    found = [
        (config.critic.critic_hf_checkpoint if config.has_critic else "", "--critic-hf-checkpoint"),
        (config.rewards.reward_model_hf_checkpoint, "--reward-model-hf-checkpoint"),
        *((path, "--teacher-hf-checkpoint") for path in config.distillation.teachers.values()),
    ]
    return [(path, flag) for path, flag in found if path]


def _other_layouts(
    config: RLRunConfig, base: RunPlan, world: int, files: bool
) -> tuple[MegatronLayout | None, MegatronLayout | None, dict[str, MegatronLayout]]:
    """Return the layouts of the critic, the reward model and the teachers."""
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
    return critic, reward_model, teachers


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
    if rollout.physical_experts or rollout.layer_experts:
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
    """Refuse what a platform's engine or its updates cannot do, in a start and a dry run. Local.

    Runs without rollouts pass.

    Args:
        config: Configuration of the run.
        plan: Plan of the run.
        platform: ``"cpu"``, ``"cuda"`` or ``"npu"``.

    Raises:
        UsageError: A flag or the model is refused; names it, and what to use.
    """
    if isinstance(config, RLRunConfig) and isinstance(plan, RLPlan):
        engine = engine_provider()
        check_each(
            partial(check_deltas_on, config, platform),
            partial(engine.check_run, config, platform),
            partial(engine.check_build, config, plan.rollout_layout, platform),
        )


def _check_rl_model(config: RLRunConfig, limit: int, files: bool, spec: ModelSpec) -> None:
    """Check the flags against the model; the longest sequence has ``limit`` tokens."""
    checks: list[Callable[[], object]] = [
        partial(_check_mtp, config.checkpoint, config.model, spec),
        partial(_check_routing, config, spec),
        partial(_check_length, limit, config, spec),
        partial(_check_kv_cache, limit, config, spec),
    ]
    if files:
        checks.append(partial(_check_tokenizer, config.model))
    check_each(*checks)


def _check_routing(config: RLRunConfig, spec: ModelSpec) -> None:
    if config.rl.rl_routing_replay != "none" and not spec.expert_layers:
        raise UsageError(
            f"--rl-routing-replay {config.rl.rl_routing_replay}: the model has no experts; "
            "remove it"
        )


def plan_score(config: ScoreRunConfig, world: int) -> ScorePlan:
    """Validate a scoring configuration for ``world`` ranks, and plan it.

    Raises:
        UsageError: A flag is wrong; names it, its value, what is allowed and the fix.
    """
    mistakes = Mistakes()
    with mistakes:
        check_needs(config)
    with mistakes:
        _check_scored_options(config.engine_options)
    with mistakes:
        need_file("--tokens", config.score.tokens, "an .npz file")
    with mistakes:
        _check_score_output(config.score)
    with mistakes:
        engine = engine_layout(config.rollout, world)
    with mistakes:
        base = plan_training(config, world)
    mistakes.report()
    rollout = engine_provider().layout(base.spec, engine, EngineTuningConfig())
    return ScorePlan(base.spec, base.parallel, base.megatron, rollout)


def _check_scored_options(options: Mapping[str, object]) -> None:
    """Refuse options that no engine may have, and drafts, of which scoring has no use."""
    engine_provider().check_options(options)
    if OPTION in options:
        raise UsageError(f"{FLAG}: scores are of given tokens, and drafts of others; remove it")


def _check_score_output(score: ScoreConfig) -> None:
    if not score.output:
        raise UsageError("--output is required: give the .npz file to write")
    check_output_file("--output", score.output)
    if score.temperature != 1 and score.backend == "engine":
        raise UsageError(
            f"--temperature {score.temperature} with --backend engine: engines score prompts "
            "without temperature; allowed: 1"
        )


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
    mistakes = Mistakes()
    with mistakes:
        check_needs(config)
    with mistakes:
        check_supervised_flags(config, world, files=files)
    with mistakes:
        base = plan_training(config, world, files, partial(_check_supervised_model, config, files))
        _check_supervised_batch(config.train.global_batch_size, base.parallel.dp)
    mistakes.report()
    return base


def _check_supervised_model(config: PretrainRunConfig, files: bool, spec: ModelSpec) -> None:
    """Check the flags against the model."""
    checks: list[Callable[[], object]] = [
        partial(_check_mtp, config.checkpoint, config.model, spec)
    ]
    if files and config.sft.stage == "sft":
        checks.append(partial(_check_tokenizer, config.model))
    check_each(*checks)
    if config.train.seq_length > spec.max_position_embeddings:
        raise UsageError(
            f"--seq-length {config.train.seq_length} exceeds the model's max_position_embeddings "
            f"{spec.max_position_embeddings}; lower it"
        )


def _check_supervised_batch(samples: int, dp: int) -> None:
    if samples < 1 or samples % dp:
        raise UsageError(
            f"--global-batch-size {samples}: must be a positive multiple of the data-parallel size "
            f"{dp}"
        )


def _check_tokenizer(model: ModelConfig) -> None:
    if model.tokenizer_name_or_path:
        check_tokenizer_files(model.tokenizer_name_or_path, "--tokenizer-name-or-path")
    else:
        check_tokenizer_files(model.hf_checkpoint, "--hf-checkpoint")


def _check_mtp(checkpoint: CheckpointConfig, model: ModelConfig, spec: ModelSpec) -> None:
    if checkpoint.keep_mtp and not spec.num_mtp_layers:
        raise UsageError(
            f"--keep-mtp: the model {model.hf_checkpoint} has no multi-token-prediction layers "
            "(num_nextn_predict_layers); remove the flag"
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


def _check_kv_cache(limit: int, config: RLRunConfig, spec: ModelSpec) -> None:
    """Check that a sequence of ``limit`` tokens fits the cache, earlier than the engine does."""
    rollout = config.rollout
    tp = rollout.rl_inference_tensor_model_parallel_size
    item = 2 if rollout.engine_is_bf16(config.train) else 4
    token_bytes = cached_values(spec, draft_model_of(config.engine_options), tp) * item
    needed_gb = limit * token_bytes / 2**30
    if 0 < rollout.rollout_kv_cache_gb < needed_gb:
        raise UsageError(
            f"--rollout-kv-cache-gb {rollout.rollout_kv_cache_gb:g}: one sequence of {limit} "
            f"tokens needs {needed_gb:.3g} GiB per rank; raise it, leave it out so that the run "
            "chooses, or lower --max-prompt-length, --rollout-max-response-length or --seq-length"
        )


def plan_training(
    config: RLRunConfig | PretrainRunConfig | ScoreRunConfig,
    world: int,
    files: bool = True,
    check_spec: Callable[[ModelSpec], None] | None = None,
) -> RunPlan:
    """Plan the training layout of a model, with ``files`` also checking that weights exist.

    Args:
        config: Configuration of the run.
        world: Number of ranks.
        files: Whether the model's files must be complete.
        check_spec: Further check of the flags against the model.

    Raises:
        UsageError: Flags are wrong; each mistake names its flag, value, what is allowed, the fix.
    """
    model, parallel, train = config.model, config.parallel, config.train
    checkpoint, mistakes = model.hf_checkpoint, Mistakes()
    with mistakes:
        check_warmup(train)
    with mistakes:
        check_recompute(train)
    with mistakes:
        spec = spec_from_hf_config(model_config(checkpoint, "--hf-checkpoint", files=files))
        gathers = spec.moe is not None and config.kernels.moe_token_dispatcher_type == "allgather"
        with mistakes:
            check_hybrid_context(train, parallel, gathers=gathers)
        with mistakes:
            check_architecture(model, spec, parallel.tensor_model_parallel_size)
        if check_spec is not None:
            with mistakes:
                check_spec(spec)
        if files and not draws_weights(config):
            with mistakes:
                find_weights(checkpoint)
        megatron = _megatron_layout(model, parallel, spec, world)
    mistakes.report()
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
