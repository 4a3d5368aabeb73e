"""Seconds of a step from the machine file: each with the formula that gave it."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.validate import RLPlan, RunPlan
from mindspeed_rl.dryrun.machine import Machine
from mindspeed_rl.memory.owners import MemoryPhase, Owner
from mindspeed_rl.memory.prediction import MemoryPrediction
from mindspeed_rl.models.expert_rules import ExpertRow
from mindspeed_rl.models.registry import weight_table
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.models.tensors import tensor_groups


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


def active_parameters(spec: ModelSpec) -> int:
    """Weights that one token is multiplied with: ``top_k`` experts of each layer."""
    experts = {
        row.param
        for row in weight_table(spec.family).trainer_rows(spec)
        if isinstance(row, ExpertRow)
    }
    top_k = spec.moe.top_k if spec.moe else 0
    active = 0
    for group in tensor_groups(spec):
        count = group.num_parameters
        active += count * top_k // spec.num_experts if group.row in experts else count
    return active - spec.vocab_size * spec.hidden_size  # the embedding is looked up


def recomputed_share(prediction: MemoryPrediction) -> float:
    """Share of the layers whose forward pass runs twice; parts of layers do not count."""
    train, stages = prediction.config.train, prediction.plan.parallel.stages
    if train.recompute_granularity != "full":
        return 0.0
    if train.recompute_method == "uniform":
        return 1.0
    again = sum(min(train.recompute_num_layers or 0, n) for n in stages.layers_per_chunk)
    return again / stages.num_layers


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
        return [_update(prediction, machine, config.train.global_batch_size * lengths.total, 1)]
    tokens = plan.batch.samples * lengths.total
    rows = [_generate(prediction, plan, machine, lengths)]
    if update_seconds is not None:
        rows.append(PhaseSeconds("reshard", update_seconds, "see the volumes above"))
    rows.append(_switch(prediction, machine))
    passes = int(config.rl.grpo_kl_beta > 0)
    if config.rl.old_logprob == "recompute" or plan.batch.updates > 1:
        passes += 1
    if passes:
        rows.append(_logprobs(prediction, machine, tokens, passes))
    rows.append(_update(prediction, machine, tokens, plan.batch.iterations))
    return rows


def _bubble(prediction: MemoryPrediction) -> tuple[float, int]:
    """Factor of the pipeline's fill and drain: 1 + (pp - 1) / (vpp x micro-batches)."""
    parallel = prediction.plan.parallel
    count = prediction.workload.num_micro_batches
    return 1 + (parallel.pp - 1) / (parallel.stages.vpp * count), count


def _update(
    prediction: MemoryPrediction, machine: Machine, tokens: float, repeats: int
) -> PhaseSeconds:
    plan = prediction.plan
    active, share = active_parameters(plan.spec), recomputed_share(prediction)
    bubble, count = _bubble(prediction)
    per_token = (6 + 2 * share) * active
    seconds = repeats * tokens * per_token * bubble / (plan.parallel.world * machine.flops)
    return PhaseSeconds(
        "update",
        seconds,
        f"{repeats} x {tokens:.4g} tokens x (6 + 2 x {share:.2f} recomputed) x {active:.4g} active "
        f"parameters x {bubble:.3f} (1 + (pp - 1) / {count} micro-batches) / "
        f"({plan.parallel.world} ranks x {machine.bf16_tflops:g} TFLOP/s x "
        f"{machine.compute_efficiency:g})",
    )


def _logprobs(
    prediction: MemoryPrediction, machine: Machine, tokens: float, passes: int
) -> PhaseSeconds:
    plan, active = prediction.plan, active_parameters(prediction.plan.spec)
    bubble, _ = _bubble(prediction)
    seconds = passes * tokens * 2 * active * bubble / (plan.parallel.world * machine.flops)
    return PhaseSeconds(
        "log-probs",
        seconds,
        f"{passes} pass(es) x {tokens:.4g} tokens x 2 x {active:.4g} x {bubble:.3f} / (as above)",
    )


def _generate(
    prediction: MemoryPrediction, plan: RLPlan, machine: Machine, lengths: Lengths
) -> PhaseSeconds:
    """Steps of decoding, each bound by memory traffic plus what every layer costs besides.

    Among many samples some are as long as allowed, and everybody waits for them.
    """
    engine = prediction.engine
    groups = plan.engine.num_groups
    mean_tokens = lengths.prompt + lengths.response / 2
    room = int(engine.kv_cache() / (mean_tokens * engine.token_bytes()))
    sequences = max(1, min(engine.sequences, -(-plan.batch.samples // groups), room))
    waves = -(-plan.batch.samples // (groups * sequences))
    weights = max(engine.weights(rank) for rank in prediction.representatives())
    cached = sequences * mean_tokens * engine.token_bytes()
    layers = plan.spec.num_layers
    step = (weights + cached) / machine.memory_bytes_per_s + layers * machine.decode_layer_us * 1e-6
    config = prediction.config
    assert isinstance(config, RLRunConfig)
    longest = config.rollout.rollout_max_response_length
    active = active_parameters(plan.spec)
    prefill = plan.batch.samples * lengths.prompt * 2 * active
    prefill_s = prefill / (plan.parallel.world * machine.flops)
    return PhaseSeconds(
        "generate",
        waves * longest * step + prefill_s,
        f"{waves} wave(s) x {longest} tokens of the longest x (({weights / 1e9:.1f} GB weights + "
        f"{cached / 1e9:.1f} GB cache of {sequences} sequences) / ({machine.memory_gb_s:g} GB/s x "
        f"{machine.memory_efficiency:g}) + {layers} layers x {machine.decode_layer_us:g} us) + "
        f"{prefill_s:.3g} s prefill",
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
