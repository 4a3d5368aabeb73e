"""Estimates the seconds of an RL step on machines whose constants were fitted to a published run.

Counted are decoding, the passes without gradient, and the updates. Prefill of prompts, rewards, the
weight update and offloading are not: they were 22 of the 860 s of the run that was fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.graph_sizes import decode_batches
from mindspeed_rl.models.flops import sequence_flops
from mindspeed_rl.packing.micro_batches import PackingEstimate
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.run_plan import RLPlan, is_first_old_pass_free


@dataclass(frozen=True, slots=True)
class Factor:
    """How far a phase may be from its estimate: by what it is divided and multiplied."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Constants of one rank of a machine.

    Attributes:
        bf16_tflops: Peak of dense matrix products; the vendor's.
        memory_gb_s: Peak of the device's memory; the vendor's.
        memory_efficiency: Share of it that decoding reaches (assumed).
        update_efficiency: Share of ``bf16_tflops`` that updates reach (fitted).
        pass_efficiency: Share of it that passes without gradient reach (fitted).
        decode_layer_us: Time of a layer in a decode step by graphs besides its memory traffic:
            launches, collectives, and the host's work between steps (fitted).
        eager_factor: The same of eager decoding as a multiple.
        training: Range of updates and passes.
        decode: Range of decoding by graphs.
        decode_eager: Range of eager decoding.
        source: Where the fitted constants and the ranges come from.
    """

    bf16_tflops: float
    memory_gb_s: float
    memory_efficiency: float
    update_efficiency: float
    pass_efficiency: float
    decode_layer_us: float
    eager_factor: float
    training: Factor
    decode: Factor
    decode_eager: Factor
    source: str


SPEEDS = {
    "a3": Speed(
        bf16_tflops=376.0,
        memory_gb_s=1600.0,
        memory_efficiency=0.6,
        update_efficiency=0.333,
        pass_efficiency=0.184,
        decode_layer_us=1463.0,
        # 171 ms a token without graphs and 56 with them (vllm-ascend issue 7723), and "about twice"
        # in the CANN recipe: the middle of both, and the range from one to the other.
        eager_factor=2.5,
        # Updates and passes without gradient of the fitted run reach shares of the peak that differ
        # 1.8 times, for which the model has no reason: half of that way up and down.
        training=Factor(1.35, 1.35),
        # Upwards: of the same recipe 137.6 and 124.7 ms a token are published, without and with
        # core binding and garbage collection switched off. Downwards: the recipe's other runs,
        # which decoded 15 to 21 % faster than the constant says.
        decode=Factor(1.30, 1.10),
        decode_eager=Factor(1.30 * 1.25, 1.10 * 1.22),
        source=(
            "constants fitted to the CANN recipe's DeepSeek-R1 run of 859.7 s on 256 dies; the "
            "range of decoding is as wide as its other runs without drafts ask for "
            "(python tools/bench/published_steps.py)"
        ),
    ),
}
"""Constants by machine; the others have no published run to fit, and no seconds."""


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """The estimated seconds of one phase of a step, with their range."""

    phase: str
    seconds: float
    low: float
    high: float

    @classmethod
    def within(cls, phase: str, seconds: float, factor: Factor) -> PhaseSeconds:
        """Make the estimate of a phase with the range of a factor."""
        return cls(phase, seconds, seconds / factor.low, seconds * factor.high)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """The estimated seconds of one step, phase by phase.

    Attributes:
        phases: The phases that are counted.
        source: Where the constants come from.
    """

    phases: tuple[PhaseSeconds, ...]
    source: str

    @property
    def whole(self) -> PhaseSeconds:
        """The sum of all phases, whose ranges add up, too."""
        phases = self.phases
        return PhaseSeconds(
            "sum",
            sum(p.seconds for p in phases),
            sum(p.low for p in phases),
            sum(p.high for p in phases),
        )


def step_seconds(
    prediction: MemoryPrediction,
    packing: PackingEstimate,
    lengths: Sequence[int],
    speed: Speed | None = None,
) -> StepSeconds | None:
    """Estimate the seconds of a step; ``None`` on machines without fitted constants. Pure.

    Args:
        prediction: Prediction of the run.
        packing: How an optimizer step of ``lengths`` is packed.
        lengths: Drawn tokens of the sequences of one optimizer step.
        speed: Constants; by default those of the prediction's machine.
    """
    speed = speed or SPEEDS.get(prediction.machine.name)
    if speed is None:
        return None
    config, plan = prediction.config, prediction.plan
    work = _Work.of(prediction, packing, lengths)
    # The backward pass takes twice the operations of the forward pass.
    update = (3 * work.forward + work.recomputed) / speed.update_efficiency

    def phase(name: str, operations: float) -> PhaseSeconds:
        return PhaseSeconds.within(name, operations / (speed.bf16_tflops * 1e12), speed.training)

    if not isinstance(config, RLRunConfig) or not isinstance(plan, RLPlan):
        return StepSeconds((phase("update", update),), speed.source)
    batch = plan.batch
    updates = batch.updates_per_iteration
    one_pass = work.forward / speed.pass_efficiency
    passes = {
        "old log-probs": _old_passes(config, plan),
        "reference": updates * (config.rl.grpo_kl_beta > 0),
        "reward model": updates * (plan.reward_model is not None),
        "teachers": updates
        * sum(
            sequence_flops(teacher.spec)[0] / sequence_flops(plan.spec)[0]
            for teacher in plan.teachers.values()
        ),
    }
    found = [_rollout(prediction, speed, lengths)]
    found += [phase(name, count * one_pass) for name, count in passes.items() if count]
    if plan.critic is not None:
        found.append(phase("critic", updates * one_pass + batch.updates * update))
    found.append(phase("update", batch.updates * update))
    return StepSeconds(tuple(found), speed.source)


@dataclass(frozen=True, slots=True)
class _Work:
    """Operations of each rank in one optimizer step, its share of the pipeline's bubble included.

    Attributes:
        forward: Of a forward pass.
        recomputed: Of what the backward pass computes again.
    """

    forward: float
    recomputed: float

    @classmethod
    def of(
        cls, prediction: MemoryPrediction, packing: PackingEstimate, lengths: Sequence[int]
    ) -> _Work:
        """Count the operations of a packed optimizer step.

        Padding runs through linear layers, not through attention. A pipeline of p stages with v
        chunks each is idle for (p - 1) / v of its m micro-batches (Narayanan et al. 2021,
        arXiv:2104.04473).
        """
        parallel = prediction.plan.parallel
        linear, quadratic = sequence_flops(prediction.plan.spec)
        tokens = packing.samples * packing.mean_length / packing.real_share
        attention = quadratic * sum(n * n for n in lengths)
        bubble = 1 + (parallel.pp - 1) / (parallel.stages.vpp * packing.num_micro_batches)
        per_rank = bubble / parallel.world
        forward = linear * tokens + attention
        again = _recomputed(prediction, linear * tokens, attention, tokens)
        return cls(forward * per_rank, again * per_rank)


def _recomputed(
    prediction: MemoryPrediction, linear: float, attention: float, tokens: float
) -> float:
    """Return the operations that ``--recompute-granularity`` runs a second time."""
    train, spec = prediction.config.train, prediction.plan.spec
    stages = prediction.plan.parallel.stages
    if train.recompute_granularity == "none":
        return 0.0
    if train.recompute_granularity == "full":
        count = train.recompute_num_layers or 1
        kinds = stages.layers_per_chunk
        layers = sum(
            kinds if train.recompute_method == "uniform" else (min(count, n) for n in kinds)
        )
        return (linear + attention) * layers / stages.num_layers
    again = attention if "core_attn" in train.recompute_modules else 0.0
    for layer in spec.layers:
        if (mlp := layer.mlp).recompute_module in train.recompute_modules:
            # saved are three products of each channel, which as many matrices have
            values = mlp.saved_values + mlp.top_k * mlp.copy_values
            again += 2.0 * values * spec.hidden_size * tokens
    return again


def _old_passes(config: RLRunConfig, plan: RLPlan) -> int:
    """Return the optimizer batches whose old log-probs cost a pass of their own."""
    if config.rl.old_logprob == "rollout":
        return 0
    free = is_first_old_pass_free(config, plan.batch.iterations)
    return plan.batch.updates_per_iteration - free


def _rollout(prediction: MemoryPrediction, speed: Speed, lengths: Sequence[int]) -> PhaseSeconds:
    """Estimate decoding: the steps of the rank that has most, tail included.

    Every step reads the weights and the cache of what runs. Lengths count as responses, because
    nothing says how much of them is prompt. Among all samples of a step somebody's response is the
    longest, and the step ends with it.
    """
    config, plan, engine = prediction.config, prediction.plan, prediction.engine
    assert isinstance(config, RLRunConfig) and isinstance(plan, RLPlan)
    limit = config.rollout.rollout_max_response_length
    drawn = sorted((min(n, limit) for n in lengths), reverse=True)
    groups = plan.engine.num_groups
    mean = sum(drawn) / len(drawn)
    of_group = drawn[::groups] * plan.batch.updates_per_iteration  # the first has the longest
    room = int(engine.kv_cache() / (mean * engine.token_bytes()))
    capacity = max(1, min(engine.sizes.sequences, room))
    weights = max(engine.weights(rank) for rank in prediction.representatives())
    bandwidth = speed.memory_gb_s * 1e9 * speed.memory_efficiency
    eager = prediction.tuning[0].rollout_graph_mode == "eager"
    layer_us = speed.decode_layer_us * (speed.eager_factor if eager else 1.0)
    fixed = weights / bandwidth + plan.spec.num_layers * layer_us * 1e-6
    per_sequence = mean / 2 * engine.token_bytes() / bandwidth
    steps = decode_batches(of_group, capacity)
    seconds = sum(count * (fixed + running * per_sequence) for running, count in steps.items())
    return PhaseSeconds.within("rollout", seconds, speed.decode_eager if eager else speed.decode)
