"""``--rl-selftest loss``: loss, metrics and gradients do not depend on the layout.

A tiny random model trains on the same few samples in every layout that the world can be factored
into and with every way of cutting the samples into micro-batches; the results are compared with
those of one rank and one micro-batch. Every policy loss is tried with every aggregation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_rl.algorithms.losses import policy_loss
from mindspeed_rl.algorithms.selection import CovarianceSettings
from mindspeed_rl.algorithms.token_advantages import rewards_to_tokens
from mindspeed_rl.algorithms.types import Denominators, LossInputs, LossOutputs
from mindspeed_rl.algorithms.value_loss import ValueLossSettings
from mindspeed_rl.config import ModelConfig, ParallelConfig, RLRunConfig, TrainConfig
from mindspeed_rl.config.architecture import value_layout
from mindspeed_rl.config.validate import RLPlan, check_layout
from mindspeed_rl.data.packing import TrainSample, pack
from mindspeed_rl.data.tiny_model import write_tiny_model
from mindspeed_rl.launch.job import Job
from mindspeed_rl.observability.metrics import reduce_metrics
from mindspeed_rl.orchestration import rl_critic, training
from mindspeed_rl.orchestration.rl_batch import selected_tokens
from mindspeed_rl.orchestration.rl_critic import value_loss_function, value_targets
from mindspeed_rl.orchestration.rl_step import silent_metrics
from mindspeed_rl.orchestration.selftest_cases import (
    CASES,
    CUTS,
    LONGEST,
    PAIRS,
    VALUE,
    Case,
    Cut,
    Finding,
    Gradients,
    Layout,
    Outcome,
    compare,
)
from mindspeed_rl.orchestration.value_models import load_value_model, value_engine
from mindspeed_rl.resharding.executor import Resharder
from mindspeed_rl.resharding.layouts.hf_file import HfFileLayout
from mindspeed_rl.resharding.transports import AllToAllTransport
from mindspeed_rl.trainer import parallel_state
from mindspeed_rl.trainer.prepared import PreparedBatch
from mindspeed_rl.trainer.train_engine import LossFunction, TrainEngine

NUM_LAYERS, NUM_HEADS = 4, 4
VOCAB_SIZE = 307  # no tensor-parallel degree divides it

RLJobOf = Job[RLRunConfig, RLPlan]


def layouts_of(world: int) -> list[Layout]:
    """All factorings of a world that the tiny model allows, with and without sequence parallelism.

    Args:
        world: ranks.
    """
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    found = []
    for tp, pp, cp in product(sizes, repeat=3):
        if world % (tp * pp * cp) == 0 and NUM_HEADS % tp == 0 and NUM_LAYERS % pp == 0:
            found += [Layout(tp, pp, cp, sp) for sp in ((False, True) if tp > 1 else (False,))]
    return found


def run(
    job: RLJobOf,
    layouts: Sequence[Layout] | None = None,
    cases: Sequence[Case] = CASES,
    cuts: Sequence[Cut] = CUTS,
    pick: Callable[[Layout, Cut], Sequence[Case]] | None = None,
) -> list[Finding]:
    """Compare all layouts with one rank. Collective: the world.

    Args:
        job: of the RL entry; its model and batches are not used.
        layouts: to compare; all of :func:`layouts_of` by default.
        cases: losses and aggregations.
        cuts: into micro-batches.
        pick: the cases of a layout and cut, of ``cases``; all of them by default.

    Returns:
        One finding per layout and cut on rank 0, nothing elsewhere.
    """
    job = _tiny_job(job)
    with job.watchdog.phase("selftest: one rank"), InLayout(job, Layout()) as models:
        engine = models.policy
        samples = _with_behaviour(engine, _samples())
        everything = engine.prepare([pack(samples, sum(s.length for s in samples))])
        wanted = {c: _outcome(models, everything, samples, c, _alone) for c in cases}
    for outcome in wanted.values():  # every rank had all samples
        for gradient in outcome.gradients.values():
            gradient /= job.world.size
    findings = []
    for layout in layouts_of(job.world.size) if layouts is None else layouts:
        where = layout.name(job.world.size)
        with job.watchdog.phase(f"selftest: {where}"), InLayout(job, layout) as models:
            for cut in cuts:
                chosen = cases if pick is None else pick(layout, cut)
                if not chosen:
                    continue
                batches = training.local_batches(_cut(models.job, cut), models.policy, samples)
                found = {c: _outcome(models, batches, samples, c) for c in chosen}
                if job.world.rank == 0:
                    findings.append(compare(where, cut.name, layout, found, wanted))
    return findings


def check(job: RLJobOf) -> None:
    """The self-test of the command line: every case in every layout. Collective: the world.

    Raises:
        RuntimeError: something depends on the layout.
    """
    job.say(f"self-test of the loss: {len(CASES)} cases in {len(layouts_of(job.world.size))} "
            f"layouts of {job.world.size} ranks, {len(CUTS)} cuts each")  # fmt: skip
    findings = run(job)
    for f in findings:
        job.say(
            f"{'ok  ' if f.holds else 'FAIL'} {f.layout}, {f.cut}: worst metric "
            f"{f.metric[0]:.2g} ({f.metric[1]}), worst gradient {f.gradient[0]:.2g} "
            f"({f.gradient[1]}) of its tolerance"
        )
    failed = torch.tensor([sum(not f.holds for f in findings)], device=job.platform.device)
    dist.broadcast(failed, 0)
    if int(failed):
        raise RuntimeError(
            f"self-test of the loss: {int(failed)} layouts or cuts give other results than one "
            "rank; the lines above name the worst of each"
        )
    job.say("self-test of the loss: passed")


def _tiny_job(job: RLJobOf) -> RLJobOf:
    """The job with the tiny model, which the first rank of every node writes. Collective."""
    folder = Path(job.config.logging.output_dir) / "selftest_model"
    if job.world.local_rank == 0:
        write_tiny_model(
            folder,
            # no biases: keys' have almost no gradient (softmax), so only rounding to compare
            family="llama",
            vocab_size=VOCAB_SIZE,
            num_layers=NUM_LAYERS,
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_HEADS,
        )
    dist.barrier()
    model = ModelConfig(hf_checkpoint=str(folder), make_vocab_size_divisible_by=8)
    return replace(job, config=replace(job.config, model=model, train=TrainConfig(train_iters=1)))


@dataclass(frozen=True, slots=True)
class Models:
    """The job in a layout, with a policy and a critic on this rank."""

    job: RLJobOf
    policy: TrainEngine
    critic: TrainEngine
    whole: WholeTensors
    whole_of_critic: WholeTensors


class InLayout:
    """The models of a layout; megatron-core's state is undone at the end."""

    def __init__(self, job: RLJobOf, layout: Layout) -> None:
        parallel = ParallelConfig(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            sequence_parallel=layout.sp,
            platform=job.config.parallel.platform,
        )
        config = replace(job.config, parallel=parallel)
        base = check_layout(config.model, parallel, config.train, job.world.size)
        plan = replace(job.plan, spec=base.spec, parallel=base.parallel, megatron=base.megatron)
        self._job = replace(job, config=config, plan=plan)
        self._critic = value_layout(
            config, base.spec, job.world.size, ("", "--hf-checkpoint"), files=True
        )

    def __enter__(self) -> Models:
        job = self._job
        training.initialize_parallel(job)
        policy = training.build_engine(job, "policy", 1)
        critic = value_engine(job, "critic", self._critic, job.config.train, 1)
        load_value_model(job, self._critic, critic, "", "--hf-checkpoint")
        if critic.is_last:  # a head of 0 passes no gradient on
            weight = critic.named_parameters()["output_layer.weight"]
            with torch.no_grad():
                weight.copy_(torch.linspace(-0.3, 0.5, weight.numel()).view_as(weight))
        critic.weights_changed()
        return Models(job, policy, critic, WholeTensors(job, policy), WholeTensors(job, critic))

    def __exit__(self, *_: object) -> None:
        parallel_state.forget()


def _cut(job: RLJobOf, cut: Cut) -> RLJobOf:
    train = replace(
        job.config.train,
        micro_batch_size=max(1, cut.samples),
        max_tokens_per_micro_batch=cut.tokens,
    )
    return replace(job, config=replace(job.config, train=train))


def _samples() -> list[TrainSample]:
    """The same on every rank; behaviour log-probs are noise so far."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i, (num_prompt, num_trained) in enumerate(PAIRS):
        ids = torch.randint(5, VOCAB_SIZE, (num_prompt + num_trained,), generator=generator)
        noise = torch.randn(num_trained, generator=generator)
        advantage = (-1.0) ** i * (0.2 + float(torch.rand((), generator=generator)))
        samples.append(TrainSample(i, ids, num_prompt, noise, advantage))
    return samples


def _with_behaviour(engine: TrainEngine, samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The engine's log-probs 0.15 sigma around the policy's: some ratios are clipped."""
    result = []
    for sample in samples:
        (logp,) = engine.logprobs(engine.prepare([pack([sample], sample.length)]))
        assert logp is not None and sample.rollout_logprobs is not None
        near = logp.cpu() + 0.15 * sample.rollout_logprobs
        result.append(replace(sample, rollout_logprobs=near))
    return result


def _annotated(prepared: PreparedBatch) -> PreparedBatch:
    """Old and reference log-probs that are a function of the token alone."""
    batch = prepared.batch
    places = batch.positions[batch.loss_mask].float()
    return replace(
        prepared,
        old_logprobs=batch.rollout_logprobs + 0.05 * places.sin(),
        ref_logprobs=batch.rollout_logprobs - 0.1,
    )


def _with_targets(
    engine: TrainEngine,
    batches: Sequence[PreparedBatch],
    reduce: Callable[[torch.Tensor], torch.Tensor],
) -> list[PreparedBatch]:
    """Values of a pass, moved a little, and the returns of GAE; one sample has no reward."""
    found = engine.values(batches)
    result = []
    for prepared, values in zip(batches, found, strict=True):
        batch = prepared.batch
        if values is None:
            result.append(prepared)
            continue
        values = values + 0.3 * batch.positions[batch.loss_mask].float().sin()
        ids = torch.tensor(batch.sample_ids, dtype=torch.long, device=values.device)
        rewards = ids.float().cos()
        annotated = replace(prepared, old_values=values)
        targets = value_targets(
            annotated,
            rewards_to_tokens(rewards, batch.num_trained),
            reduce,
            discount=0.98,
            trace_decay=0.9,
        )
        returns = targets.returns.masked_fill((ids == 1)[batch.sequence_of], math.nan)
        result.append(replace(annotated, returns=returns))
    return result


def _alone(values: torch.Tensor) -> torch.Tensor:
    return values


def _outcome(
    models: Models,
    batches: Sequence[PreparedBatch],
    samples: Sequence[TrainSample],
    case: Case,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Outcome:
    """One update without its step. Collective: the world.

    ``reduce`` replaces the sum over the ranks with other tokens where there are none.
    """
    batches = [_annotated(b) for b in batches]
    counts = Denominators.of(s.num_trained for s in samples)
    if case.loss == VALUE:
        return _outcome_of_critic(models, batches, counts, case, reduce)
    engine = models.policy
    if case.loss in ("clip_cov", "kl_cov"):
        chosen = CovarianceSettings(0.1, case.loss == "kl_cov", lower=-9.0, upper=9.0)
        current = engine.logprobs(batches)
        if engine.is_last:
            batches = selected_tokens(batches, current, chosen, reduce or engine.sum_over_tokens)
    loss = make_loss(case, counts)
    found = engine.forward_backward(batches, loss)
    metrics = reduce_metrics(silent_metrics(loss).merge(found))
    return Outcome(metrics, models.whole.gather(engine.gradients()))


def _outcome_of_critic(
    models: Models,
    batches: Sequence[PreparedBatch],
    counts: Denominators,
    case: Case,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None,
) -> Outcome:
    critic = models.critic
    batches = _with_targets(critic, batches, reduce or critic.sum_over_context)
    loss = value_loss_function(ValueLossSettings(0.2, case.aggregation, LONGEST), counts)
    found = critic.forward_backward(batches, loss)
    metrics = reduce_metrics(rl_critic.silent_metrics(loss).merge(found))
    return Outcome(metrics, models.whole_of_critic.gather(critic.gradients()))


def make_loss(case: Case, denominators: Denominators) -> LossFunction:
    """The loss of a case."""

    def loss(inputs: LossInputs) -> LossOutputs:
        return policy_loss(inputs, case.settings, denominators)

    return loss


class WholeTensors:
    """Gathers what is named and cut like the weights. Collective: the world."""

    def __init__(self, job: RLJobOf, engine: TrainEngine) -> None:
        source, rank, device = engine.layout, job.world.rank, job.platform.device
        target = HfFileLayout(source.hf_shapes)
        self._shapes, self._device = target.local_shapes(rank), device
        self._resharder = Resharder(
            source,
            target,
            rank=rank,
            ranks_per_node=job.world.size,
            transport=AllToAllTransport(job.world.size, device, None),
            dtype=torch.float32,
            bucket_bytes=1 << 20,
        )

    def gather(self, params: Mapping[str, torch.Tensor]) -> Gradients:
        """Whole tensors by HF name on rank 0, fp32; empty elsewhere. Collective: the world."""
        whole = {
            name: torch.full(shape, math.nan, device=self._device)
            for name, shape in self._shapes.items()
        }
        self._resharder.run(params, whole)
        return whole
