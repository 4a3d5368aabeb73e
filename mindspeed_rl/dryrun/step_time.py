"""Seconds of a step from the machine file: each with the formula that gave it."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.validate import RLPlan, RunPlan
from mindspeed_rl.dryrun.machine import Machine
from mindspeed_rl.memory.owners import MemoryPhase, Owner
from mindspeed_rl.memory.prediction import MemoryPrediction
from mindspeed_rl.models.flops import (
    active_by_part,
    attention_flops,
    forward_flops,
)
from mindspeed_rl.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """The estimate of one phase.

    Attributes:
        phase: name.
        seconds: of one step.
        formula: how it came about, with numbers.
    """

    phase: str
    seconds: float
    formula: str


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of a sample in the estimate."""

    prompt: float
    response: float

    @property
    def total(self) -> float:
        """Prompt and response."""
        return self.prompt + self.response


def recomputed_share(prediction: MemoryPrediction, mean_length: float = 0.0) -> float:
    """Share of the forward pass that runs twice."""
    train, stages = prediction.config.train, prediction.plan.parallel.stages
    spec = prediction.plan.spec
    if train.recompute_granularity == "none":
        return 0.0
    if train.recompute_granularity == "selective":
        parts: dict[str, float] = {name: 2.0 * size for name, size in active_by_part(spec).items()}
        parts["core_attn"] = attention_flops(spec, mean_length)
        again = sum(parts.get(name, 0.0) for name in train.recompute_modules)
        return again / forward_flops(spec, mean_length)
    if train.recompute_method == "uniform":
        return 1.0
    layers = sum(min(train.recompute_num_layers or 0, n) for n in stages.layers_per_chunk)
    return layers / stages.num_layers


def mean_lengths(config: RLRunConfig | PretrainRunConfig, plan: RunPlan) -> Lengths:
    """As the flags say, or the longest that they allow."""
    options = config.dry_run
    if not isinstance(config, RLRunConfig):
        return Lengths(0.0, config.train.seq_length or plan.spec.max_position_embeddings)
    return Lengths(
        options.rl_dry_run_mean_prompt_length or config.prompts.max_prompt_length,
        options.rl_dry_run_mean_response_length or config.rollout.rollout_max_response_length,
    )


def estimate(
    prediction: MemoryPrediction, machine: Machine, update_seconds: float | None
) -> list[PhaseSeconds]:
    """Every phase of a step. Pure."""
    config, plan = prediction.config, prediction.plan
    lengths = mean_lengths(config, plan)
    if not isinstance(config, RLRunConfig) or not isinstance(plan, RLPlan):
        return [_update(prediction, machine, lengths, config.train.global_batch_size, 1)]
    samples = plan.batch.samples
    rows = [_generate(prediction, plan, machine, lengths)]
    if update_seconds is not None:
        rows.append(PhaseSeconds("reshard", update_seconds, "see the volumes above"))
    rows.append(_switch(prediction, machine))
    passes = old_logprob_share(config, plan) + int(config.rl.grpo_kl_beta > 0)
    if passes:
        rows.append(_logprobs(prediction, machine, lengths, samples, passes))
    rows.append(_update(prediction, machine, lengths, samples, plan.batch.iterations))
    if plan.critic is not None:
        spec = plan.critic.spec
        rows.append(_critic(prediction, machine, lengths, samples, plan.batch.iterations, spec))
    return rows


def old_logprob_share(config: RLRunConfig, plan: RLPlan) -> float:
    """Share of a step's samples whose old log-probs cost a pass of their own.

    The first optimizer batch of on-policy samples needs none unless something asks before its
    update (several iterations, the KL in the reward, tokens that are selected).
    """
    if config.rl.old_logprob == "rollout":
        return 0.0
    early = config.kl.rl_kl_in_reward or config.policy_loss.selects
    if config.rl.old_logprob == "recompute" or early or plan.batch.iterations > 1:
        return 1.0
    return 1.0 - 1.0 / plan.batch.updates_per_iteration


def _bubble(prediction: MemoryPrediction) -> tuple[float, int]:
    """Factor of the pipeline's fill and drain: 1 + (pp - 1) / (vpp x micro-batches)."""
    parallel = prediction.plan.parallel
    count = prediction.workload.num_micro_batches
    return 1 + (parallel.pp - 1) / (parallel.stages.vpp * count), count


def _update(
    prediction: MemoryPrediction, machine: Machine, lengths: Lengths, samples: int, repeats: int
) -> PhaseSeconds:
    """Backward takes twice the forward pass; what is recomputed runs forward once more."""
    plan = prediction.plan
    forward = forward_flops(plan.spec, lengths.total)
    share = recomputed_share(prediction, lengths.total)
    bubble, count = _bubble(prediction)
    tokens = repeats * samples * lengths.total
    seconds = tokens * (3 + share) * forward * bubble / (plan.parallel.world * machine.flops)
    return PhaseSeconds(
        "update",
        seconds,
        f"{tokens:.4g} tokens x (3 + {share:.2f} recomputed) x {forward / 1e9:.4g} GFLOP forward x "
        f"{bubble:.3f} (1 + (pp - 1) / {count} micro-batches) / ({plan.parallel.world} ranks x "
        f"{machine.bf16_tflops:g} TFLOP/s x {machine.compute_efficiency:g})",
    )


def _critic(
    prediction: MemoryPrediction,
    machine: Machine,
    lengths: Lengths,
    samples: int,
    repeats: int,
    spec: ModelSpec,
) -> PhaseSeconds:
    """A pass for the values, and its updates as the policy's."""
    world = prediction.plan.parallel.world
    forward = forward_flops(spec, lengths.total)
    cost = 1 + repeats * (3 + recomputed_share(prediction, lengths.total))
    bubble, _ = _bubble(prediction)
    tokens = samples * lengths.total
    return PhaseSeconds(
        "critic",
        tokens * cost * forward * bubble / (world * machine.flops),
        f"{tokens:.4g} tokens x {cost:.2f} (values, updates) x {forward / 1e9:.4g} GFLOP x "
        f"{bubble:.3f} / (as in update)",
    )


def _logprobs(
    prediction: MemoryPrediction, machine: Machine, lengths: Lengths, samples: int, passes: float
) -> PhaseSeconds:
    plan, forward = prediction.plan, forward_flops(prediction.plan.spec, lengths.total)
    bubble, _ = _bubble(prediction)
    tokens = passes * samples * lengths.total
    seconds = tokens * forward * bubble / (plan.parallel.world * machine.flops)
    return PhaseSeconds(
        "log-probs",
        seconds,
        f"{passes:.3g} pass(es), {tokens:.4g} tokens x {forward / 1e9:.4g} GFLOP x {bubble:.3f} / "
        "(as in update)",
    )


def _generate(
    prediction: MemoryPrediction, plan: RLPlan, machine: Machine, lengths: Lengths
) -> PhaseSeconds:
    """Steps of decoding, each bound by memory traffic plus what every layer costs besides.

    Among many samples some are as long as allowed, and everybody waits for them; there are more
    steps where not all sequences of a rank run at once.
    """
    config, engine = prediction.config, prediction.engine
    assert isinstance(config, RLRunConfig)
    samples = -(-plan.batch.samples // plan.engine.num_groups)
    mean_tokens = lengths.prompt + lengths.response / 2
    room = int(engine.kv_cache() / (mean_tokens * engine.token_bytes()))
    at_once = max(1, min(engine.sequences, samples, room))
    longest = config.rollout.rollout_max_response_length
    steps = max(longest, samples * lengths.response / at_once)
    running = samples * lengths.response / steps
    weights = max(engine.weights(rank) for rank in prediction.representatives())
    cached = running * mean_tokens * engine.token_bytes()
    layers = plan.spec.num_layers
    step = (weights + cached) / machine.memory_bytes_per_s + layers * machine.decode_layer_us * 1e-6
    prefill = plan.batch.samples * lengths.prompt * forward_flops(plan.spec, lengths.prompt)
    prefill_s = prefill / (plan.parallel.world * machine.flops)
    return PhaseSeconds(
        "generate",
        steps * step + prefill_s,
        f"{steps:.4g} steps (the longest response, or {samples} x {lengths.response:.4g} tokens / "
        f"{at_once} at once) x (({weights / 1e9:.1f} GB weights + {cached / 1e9:.1f} GB cache of "
        f"{running:.3g} running) / ({machine.memory_gb_s:g} GB/s x {machine.memory_efficiency:g}) "
        f"+ {layers} layers x {machine.decode_layer_us:g} us) + {prefill_s:.3g} s prefill",
    )


def _switch(prediction: MemoryPrediction, machine: Machine) -> PhaseSeconds:
    """What leaves for the rollout and comes back: gradients are dropped, not copied."""
    moved = 0
    for rank in prediction.representatives():
        table = prediction.rank_table(rank)
        before, during = table[MemoryPhase.TRAIN_IDLE], table[MemoryPhase.ROLLOUT]
        owners = (Owner.PARAMETERS, Owner.OPTIMIZER)
        moved = max(moved, sum(before.get(o, 0) - during.get(o, 0) for o in owners))
    seconds = 2 * moved / (machine.host_gb_s * 1e9)
    return PhaseSeconds(
        "offload",
        seconds,
        f"2 x {moved / 1e9:.1f} GB of the fullest rank / {machine.host_gb_s:g} GB/s",
    )
