"""``--rl-selftest loss``: checks that loss, metrics and gradients do not depend on the layout.

A tiny random model trains on the same few samples in every layout into which the world can be
factored and with every way of cutting the samples into micro-batches. The results are compared with
those of one rank and one micro-batch. Every policy loss is tried with every aggregation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from mindspeed_rl.algorithms.aggregation import AGGREGATIONS
from mindspeed_rl.algorithms.correction import CorrectionSettings
from mindspeed_rl.algorithms.losses import LossSettings, policy_loss
from mindspeed_rl.algorithms.policy_losses import POLICY_LOSSES, SurrogateSettings
from mindspeed_rl.algorithms.selection import select_by_covariance
from mindspeed_rl.algorithms.token_advantages import generalized_advantages, rewards_to_tokens
from mindspeed_rl.algorithms.types import Denominators, SumOverRanks
from mindspeed_rl.algorithms.value_loss import value_loss
from mindspeed_rl.building.models import (
    batch_rules,
    build_engine,
    initialize_parallel,
    load_value_model,
    new_engine,
)
from mindspeed_rl.config import ModelConfig, ParallelConfig, RLRunConfig, TrainConfig
from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.launch.job import Job
from mindspeed_rl.metrics.metric_set import reduce_metrics
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.tensors import tensor_groups
from mindspeed_rl.planning.run_plan import RLPlan, other_layout, plan_training
from mindspeed_rl.rl.critic import empty_value_metrics, values_of_rows
from mindspeed_rl.rl.update import empty_loss_metrics, with_covariance_mask
from mindspeed_rl.samples.packing import MicroBatch, pack
from mindspeed_rl.selftest.models import DENSE, MODELS, NUM_HEADS, NUM_LAYERS, VOCAB_SIZE
from mindspeed_rl.trainer import parallel_state
from mindspeed_rl.trainer.train_engine import TrainEngine
from mindspeed_rl.weight_layouts.hf_file import HfFileLayout
from mindspeed_rl.weights.executor import Resharder
from mindspeed_rl.weights.transports import AllToAllTransport

LONGEST = 32
# Prompt and trained tokens of uneven sequences; one has a single trained token, one has none.
PAIRS = ((2, 9), (7, 3), (1, 1), (12, 20), (5, 0), (3, 2), (9, 11))

# Layouts sum over ranks, and multiply within layers, in another order.
METRIC_TOLERANCE = 1e-6
EXTREME_TOLERANCE = 5e-6  # for extremes over single tokens if layers are cut
GRADIENT_TOLERANCE = 1e-6
GRADIENT_TOLERANCE_CUT = 2e-5
# Number of token means that an aggregation adds up in these metrics; the terms may cancel.
_SUMS = ("loss/policy", "value/loss")
_TOKENS = float(sum(trained for _, trained in PAIRS))
_SCALES = {
    "token-sum": _TOKENS,
    "seq-mean-token-sum": _TOKENS / sum(trained > 0 for _, trained in PAIRS),
}

RLJobOf = Job[RLRunConfig, RLPlan]
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """A training layout; the rest of the world is data parallelism.

    Attributes:
        tp: Tensor-parallel size.
        pp: Pipeline stages.
        cp: Context-parallel size.
        sp: Sequence parallelism.
        kind: Kind of context parallelism; ``"a2a+p2p"`` exchanges heads between pairs of ranks.
        hybrid: Whether rows may be shared by some of the context-parallel ranks.
        model: Model that trains, of ``selftest.models.MODELS``.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    sp: bool = False
    kind: str = "all_gather"
    hybrid: bool = False
    model: str = DENSE

    @property
    def cuts_layers(self) -> bool:
        """Whether the numbers within a layer are summed in another order."""
        return self.tp * self.cp > 1

    def name(self, world: int) -> str:
        """Return the layout as text for people."""
        dp = world // (self.tp * self.pp * self.cp)
        model = "" if self.model == DENSE else f"{self.model}, "
        tp = f"{self.tp} sp" if self.sp else f"{self.tp}"
        cp = f"{self.cp} {self.kind}" if self.cp > 1 else "1"
        hybrid = " hybrid" if self.hybrid else ""
        return f"{model}dp {dp} x tp {tp} x pp {self.pp} x cp {cp}{hybrid}"

    def allows(self, cut: str) -> bool:
        """Whether a layout can have micro-batches of a cut: rows of some ranks need a size."""
        return not self.hybrid or CUTS[cut].max_tokens_per_micro_batch != 0


@dataclass(frozen=True, slots=True)
class Case:
    """A policy loss, or the critic's loss, with an aggregation."""

    loss: str
    aggregation: str

    @property
    def settings(self) -> LossSettings:
        """Loss settings with every term on: dual clip, KL, entropy, weights, sequence rejection."""
        return LossSettings(
            policy_loss=self.loss,
            surrogate=SurrogateSettings(
                eps_lower=0.1, eps_upper=0.15, clip_ratio_c=1.3, cov_ratio=0.1,
                clip_cov_lower=-9.0, clip_cov_upper=9.0,
            ),
            aggregation=self.aggregation,
            longest=LONGEST,
            kl_beta=0.05,
            entropy_weight=0.01,
            correction=CorrectionSettings(
                True, "mask", "geometric", 1.05, 0.9, "k3", "sequence", 0.09
            ),
        )  # fmt: skip


#: How the samples of a rank become micro-batches: by number, or packed up to some tokens.
CUTS = {
    "micro-batch 1": TrainConfig(1, micro_batch_size=1, max_tokens_per_micro_batch=0),
    "micro-batch 2": TrainConfig(1, micro_batch_size=2, max_tokens_per_micro_batch=0),
    "micro-batch 8": TrainConfig(1, micro_batch_size=8, max_tokens_per_micro_batch=0),
    "packed to 48 tokens": TrainConfig(train_iters=1, max_tokens_per_micro_batch=48),
}
#: The critic's loss, with the values of a pass and the returns of GAE as its targets.
VALUE = "value"
CASES = tuple(Case(loss, mode) for loss, mode in product((*POLICY_LOSSES, VALUE), AGGREGATIONS))
Trial = tuple[Layout, str, Case]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Reduced metrics of one case, and whole gradients by HF name, which only rank 0 has."""

    metrics: Mapping[str, float]
    gradients: Gradients


@dataclass(frozen=True, slots=True)
class Finding:
    """The worst differences of one layout and cut over its cases.

    Attributes:
        layout: Name of the layout.
        cut: Name of the cut.
        metric: Largest difference of a metric over its tolerance, and the metric's name.
        gradient: Largest |g - g_ref| / |g_ref| over its tolerance, and the weight's name.
    """

    layout: str
    cut: str
    metric: tuple[float, str]
    gradient: tuple[float, str]

    @property
    def holds(self) -> bool:
        """Whether both differences are within their tolerance; a NaN is not."""
        return self.metric[0] <= 1.0 and self.gradient[0] <= 1.0


def layouts_of(world: int) -> list[Layout]:
    """Return all layouts of a world that the dense model allows, also with sequence parallelism.

    The other models are there for the kinds of context parallelism.
    """
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    others = [
        Layout(cp=cp, kind=kind, hybrid=hybrid, model=model)
        for model in MODELS
        if model != DENSE
        for cp in sizes[1:]
        for kind in _kinds(1, cp)
        for hybrid in (False, True)
    ]
    return others + [
        Layout(tp, pp, cp, sp, kind, hybrid)
        for tp, pp, cp in product(sizes, repeat=3)
        if world % (tp * pp * cp) == 0 and NUM_HEADS % tp == 0 and NUM_LAYERS % pp == 0
        for sp in ((False, True) if tp > 1 else (False,))
        for kind in _kinds(tp, cp)
        for hybrid in ((False, True) if cp > 1 else (False,))
    ]


def trials_of(world: int) -> list[Trial]:
    """Return all layouts of a world with every cut that they allow and every case."""
    return [
        (layout, cut, case)
        for layout, cut, case in product(layouts_of(world), CUTS, CASES)
        if layout.allows(cut)
    ]


def _kinds(tp: int, cp: int) -> list[str]:
    """Return the kinds of context parallelism that the heads and the ranks allow."""
    allowed = {
        "all_gather": True,
        "p2p": cp > 1,
        "a2a": cp > 1 and NUM_HEADS % (tp * cp) == 0,
        "a2a+p2p": cp > 2 and cp % 2 == 0 and NUM_HEADS % (2 * tp) == 0,
    }
    return [kind for kind, fits in allowed.items() if fits]


def check(job: RLJobOf) -> None:
    """Run every case in every layout, for the command line. Collective: the world.

    Raises:
        RuntimeError: Some result depends on the layout.
    """
    job.log_rank0(
        f"self-test of the loss: {len(CASES)} cases in {len(layouts_of(job.world.size))} "
        f"layouts of {job.world.size} ranks, up to {len(CUTS)} cuts each"
    )
    findings = run(job, trials_of(job.world.size))
    for f in findings:
        job.log_rank0(
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
    job.log_rank0("self-test of the loss: passed")


def run(job: RLJobOf, trials: Sequence[Trial]) -> list[Finding]:
    """Compare layouts with one rank. Collective: the world.

    Args:
        job: Job of the RL entry; its model and batches are not used.
        trials: Layouts, cuts and cases to compare.

    Returns:
        One finding per layout and cut on rank 0, nothing elsewhere.
    """
    models = dict.fromkeys(layout.model for layout, _, _ in trials)
    return [
        finding
        for model in models
        for finding in _run_model(
            _tiny_job(job, model), [trial for trial in trials if trial[0].model == model]
        )
    ]


def _run_model(job: RLJobOf, trials: Sequence[Trial]) -> list[Finding]:
    """Compare layouts of one model with one rank. Collective: the world."""
    cases: dict[tuple[Layout, str], list[Case]] = {}
    for layout, cut, case in trials:
        cases.setdefault((layout, cut), []).append(case)
    with job.watchdog.phase("selftest: one rank"), in_layout(job, Layout()) as models:
        samples = _with_behaviour(models.policy, _samples())
        everything = models.policy.prepare([pack(samples, sum(s.length for s in samples))])
        wanted = {
            case: _outcome(models, everything, samples, case, lambda values: values)
            for case in dict.fromkeys(case for _, _, case in trials)
        }
    for outcome in wanted.values():  # every rank had all samples
        for gradient in outcome.gradients.values():
            gradient /= job.world.size
    findings = []
    for layout in dict.fromkeys(layout for layout, _ in cases):
        where = layout.name(job.world.size)
        with job.watchdog.phase(f"selftest: {where}"), in_layout(job, layout) as models:
            for cut in (cut for at, cut in cases if at == layout):
                config = replace(models.job.config, train=CUTS[cut])
                rules = batch_rules(replace(models.job, config=config))
                batches = models.policy.prepare(rules.pack_own(samples))
                found = {c: _outcome(models, batches, samples, c) for c in cases[layout, cut]}
                if job.world.rank == 0:
                    findings.append(_compare(where, cut, layout, found, wanted))
    return findings


def _tiny_job(job: RLJobOf, model: str) -> RLJobOf:
    """Give the job a random model, which the first rank of every node writes. Collective."""
    folder = Path(job.config.logging.output_dir) / "selftest_model" / model.replace(" ", "_")
    config = dict(MODELS[model])
    if job.world.local_rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        generator, weights = torch.Generator().manual_seed(0), {}
        for group in tensor_groups(spec_from_hf_config(config)):
            for name in group.names():
                weight = 0.05 * torch.randn(group.shape, generator=generator)
                weights[name] = torch.ones(group.shape) if "norm" in name else weight
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
    dist.barrier()
    flags = ModelConfig(hf_checkpoint=str(folder), make_vocab_size_divisible_by=8)
    return replace(job, config=replace(job.config, model=flags, train=TrainConfig(train_iters=1)))


@dataclass(frozen=True, slots=True)
class SelftestModels:
    """The job in a layout, with a policy and a critic on this rank."""

    job: RLJobOf
    policy: TrainEngine
    critic: TrainEngine
    policy_gradients: Callable[[], Gradients]
    critic_gradients: Callable[[], Gradients]


def _gradients_of(job: RLJobOf, engine: TrainEngine) -> Callable[[], Gradients]:
    """Return a function that gathers whole fp32 gradients by HF name on rank 0. Collective."""
    target = HfFileLayout(engine.layout.hf_shapes)
    resharder = Resharder(
        engine.layout,
        target,
        rank=job.world.rank,
        ranks_per_node=job.world.size,
        transport=AllToAllTransport(job.world.size, job.platform.device, None),
        dtype=torch.float32,
        bucket_bytes=1 << 20,
    )

    def gather() -> Gradients:
        whole = {
            name: torch.full(shape, math.nan, device=job.platform.device)
            for name, shape in target.local_shapes(job.world.rank).items()
        }
        resharder.run(engine.gradients(), whole)
        return whole

    return gather


@contextmanager
def in_layout(job: RLJobOf, layout: Layout) -> Iterator[SelftestModels]:
    """Build the models of a layout; the end removes megatron-core's state. Collective."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sp,
        cp_comm_type=(layout.kind,),
        ulysses_degree_in_cp=2 if layout.kind == "a2a+p2p" else None,
        hybrid_context_parallel=layout.hybrid,
        platform=job.config.parallel.platform,
    )
    config = replace(job.config, parallel=parallel)
    base = plan_training(config, job.world.size)
    plan = replace(job.plan, spec=base.spec, parallel=base.parallel, megatron=base.megatron)
    job = replace(job, config=config, plan=plan)
    flags = ("", "--hf-checkpoint")
    values = other_layout(config, base.spec, job.world.size, flags, files=True)
    initialize_parallel(job)
    try:
        policy = build_engine(job, "policy", 1)
        critic = new_engine(job, "critic", values, config.train, 1)
        load_value_model(job, critic, *flags)
        if critic.is_last_stage:  # no gradient passes through a head of 0
            weight = critic.named_parameters()["output_layer.weight"]
            with torch.no_grad():
                weight.copy_(torch.linspace(-0.3, 0.5, weight.numel()).view_as(weight))
        critic.reload_master_weights()
        yield SelftestModels(
            job, policy, critic, _gradients_of(job, policy), _gradients_of(job, critic)
        )
    finally:
        parallel_state.forget()


def _samples() -> list[TrainSample]:
    """Return samples that are the same on every rank; their behaviour log-probs are noise."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i, (num_prompt, num_trained) in enumerate(PAIRS):
        ids = torch.randint(5, VOCAB_SIZE, (num_prompt + num_trained,), generator=generator)
        noise = torch.randn(num_trained, generator=generator)
        advantage = (-1.0) ** i * (0.2 + float(torch.rand((), generator=generator)))
        columns = {
            "rollout_logprobs": noise,
            "advantages": torch.full((num_trained,), advantage),
        }
        samples.append(TrainSample(i, ids, num_prompt, columns))
    return samples


def _with_behaviour(engine: TrainEngine, samples: Sequence[TrainSample]) -> list[TrainSample]:
    """Set the engine's log-probs 0.15 sigma around the policy's, so some ratios are clipped."""
    result = []
    for sample in samples:
        (logp,) = engine.logprobs(engine.prepare([pack([sample], sample.length)]))
        assert logp is not None
        near = logp.cpu() + 0.15 * sample.columns["rollout_logprobs"]
        result.append(replace(sample, columns={**sample.columns, "rollout_logprobs": near}))
    return result


def _outcome(
    models: SelftestModels,
    batches: Sequence[MicroBatch],
    samples: Sequence[TrainSample],
    case: Case,
    reduce: SumOverRanks | None = None,
) -> Outcome:
    """Do one update without its optimizer step. Collective: the world.

    ``reduce`` replaces the sum over the ranks with other tokens if there are no such ranks.
    """
    batches = [_annotated(b) for b in batches]
    counts = Denominators.of(s.num_trained for s in samples)
    if case.loss == VALUE:
        critic = models.critic
        batches = _with_targets(critic, batches)
        critic_loss = partial(
            value_loss,
            denominators=counts,
            clip=0.2,
            aggregation=case.aggregation,
            longest=LONGEST,
        )
        metrics = empty_value_metrics(critic_loss)
        metrics = metrics.merge(critic.forward_backward(batches, critic_loss))
        return Outcome(reduce_metrics(metrics), models.critic_gradients())
    engine = models.policy
    loss = partial(policy_loss, settings=case.settings, denominators=counts)
    if (choice := POLICY_LOSSES[case.loss]).selects:
        current = engine.logprobs(batches)
        if engine.is_last_stage:
            select = partial(
                select_by_covariance,
                selection=choice.selection,
                settings=case.settings.surrogate,
                seed=0,
                reduce=reduce or engine.all_reduce_dp_cp,
            )
            batches = with_covariance_mask(batches, current, select)
    metrics = empty_loss_metrics(loss).merge(engine.forward_backward(batches, loss))
    return Outcome(reduce_metrics(metrics), models.policy_gradients())


def _annotated(micro: MicroBatch) -> MicroBatch:
    """Add old and reference log-probs that depend on the token alone."""
    places, known = micro.positions[micro.trained].float(), micro.column("rollout_logprobs")
    if not micro.sample_ids:  # only samples bring advantages along
        micro = micro.with_column("advantages", torch.zeros_like(known))
    micro = micro.with_column("old_logprobs", known + 0.05 * places.sin())
    return micro.with_column("ref_logprobs", known - 0.1)


def _with_targets(engine: TrainEngine, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Add a pass's values, moved a little, and GAE's returns; one sample has no reward."""
    result = []
    for micro, values in zip(batches, engine.values(batches), strict=True):
        if values is None:
            result.append(micro)
            continue
        values = values + 0.3 * micro.positions[micro.trained].float().sin()
        ids = torch.tensor(micro.sample_ids, dtype=torch.long, device=values.device)
        annotated = micro.with_column("old_values", values)
        targets = generalized_advantages(
            rewards_to_tokens(ids.float().cos(), micro.num_trained),
            values_of_rows(annotated, partial(engine.all_reduce_row, micro)),
            micro.num_trained,
            discount=0.98,
            trace_decay=0.9,
        )
        returns = targets.returns[micro.trained_index]
        returns = returns.masked_fill((ids == 1)[micro.sequence_of], math.nan)
        result.append(annotated.with_column("returns", returns))
    return result


def _compare(
    where: str,
    cut: str,
    layout: Layout,
    found: Mapping[Case, Outcome],
    wanted: Mapping[Case, Outcome],
) -> Finding:
    """Return the worst differences over all cases. Local."""
    metrics, gradients = [], []
    for case, outcome in found.items():
        label, reference = f"{case.loss} {case.aggregation}", wanted[case].metrics
        assert outcome.metrics.keys() == reference.keys()
        for name, value in outcome.metrics.items():
            extreme = "max" in name and layout.cuts_layers
            scale = _SCALES.get(case.aggregation, 1.0) if name in _SUMS else 0.0
            limit = EXTREME_TOLERANCE if extreme else METRIC_TOLERANCE
            limit *= max(1.0, abs(reference[name]), scale)
            metrics.append((abs(value - reference[name]) / limit, f"{label} {name}"))
        limit = GRADIENT_TOLERANCE_CUT if layout.cuts_layers else GRADIENT_TOLERANCE
        errors = relative_errors(outcome.gradients, wanted[case].gradients)
        gradients += [(error / limit, f"{label} {name}") for name, error in errors.items()]
    return Finding(where, cut, _worst(metrics), _worst(gradients))


def relative_errors(found: Gradients, wanted: Gradients) -> dict[str, float]:
    """Return |g - g_ref| / |g_ref| by name, with Euclidean norms in fp64."""
    assert found.keys() == wanted.keys()
    return {
        name: float((found[name].double() - ref.double()).norm() / ref.double().norm())
        for name, ref in wanted.items()
    }


def _worst(errors: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest error; a NaN counts as larger than everything."""
    return max(errors, key=lambda e: math.inf if math.isnan(e[0]) else e[0])
