"""Worlds of real gloo ranks that train the tiny model in one layout and report what happened.

A world runs a list of :class:`Case`; each builds its own TrainEngine from the same weights through
the product's own functions and reports log-probs per sample, gradients and weights in Hugging Face
coordinates, and metrics, so that the same numbers of two layouts can be compared directly.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from mindspeed_rl.algorithms.losses import LossSettings, policy_loss, supervised_loss
from mindspeed_rl.algorithms.policy_losses import SurrogateSettings
from mindspeed_rl.algorithms.types import Denominators, LossInputs, LossOutputs
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.launch.job import Job
from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.planning.run_plan import RLPlan, plan_rl
from mindspeed_rl.platforms.registry import select_platform
from mindspeed_rl.weights.stream import TensorStream
from mindspeed_rl.weights.transports import AllToAllTransport

if TYPE_CHECKING:
    from mindspeed_rl.samples.packing import MicroBatch
    from mindspeed_rl.trainer.train_engine import TrainEngine

PAIRS = ((2, 9), (7, 3), (1, 1), (12, 20), (5, 14), (3, 2), (9, 11), (4, 17), (6, 5))
CLIP = LossSettings(
    surrogate=SurrogateSettings(eps_lower=0.2, eps_upper=0.28), kl_beta=0.05, entropy_weight=0.01
)


@dataclass(frozen=True, slots=True)
class Case:
    """One run of ``num_steps`` optimizer steps from the same weights.

    Attributes:
        name: key of the result.
        flags: command-line flags of the run, without the layout.
        loss: ``"grpo"`` (old and reference log-probs given, KL and entropy terms on),
            ``"on-policy"`` (ratio 1) or ``"sft"``.
        num_steps: optimizer steps; with 0 only the gradient is computed.
        model: directory; empty for the world's own.
    """

    name: str
    flags: tuple[str, ...] = ()
    loss: str = "grpo"
    num_steps: int = 0
    model: str = ""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What a case gave, alike for every layout.

    Attributes:
        logprobs: [response] fp32 per sample, of the first update pass.
        entropies: the same shapes.
        annotated: log-probs of the pass without gradients, same micro-batches.
        gradients: by HF name, of the first step, before clipping.
        weights: by HF name, after the last step; empty without steps.
        metrics: reduced over micro-batches and ranks, of the first step.
        grad_norms: of every step.
    """

    logprobs: list[torch.Tensor]
    entropies: list[torch.Tensor]
    annotated: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    metrics: dict[str, float]
    grad_norms: list[float]


@dataclass(frozen=True, slots=True)
class WorldResult:
    """Results of all cases of a layout, and facts about the process that made them."""

    cases: dict[str, CaseResult]
    unshimmed_modules: list[str]
    num_megatron_modules: int
    cuda_available: bool


def make_samples(vocab_size: int, seed: int = 0) -> list[TrainSample]:
    """Nine ragged samples; an odd number, so that data-parallel ranks get unequal shares."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i, (num_prompt, num_response) in enumerate(PAIRS):
        ids = torch.randint(5, vocab_size, (num_prompt + num_response,), generator=generator)
        noise = torch.randn(num_response, generator=generator)
        advantage = float(torch.randn((), generator=generator))
        columns = {
            "rollout_logprobs": noise,
            "advantages": torch.full((num_response,), advantage),
        }
        samples.append(TrainSample(i, ids, num_prompt, columns))
    return samples


def with_columns(sample: TrainSample, **columns: torch.Tensor) -> TrainSample:
    """The same with other columns in place of some."""
    return replace(sample, columns={**sample.columns, **columns})


def with_logprobs(
    samples: Sequence[TrainSample], near: Sequence[torch.Tensor]
) -> list[TrainSample]:
    """Behaviour log-probs 0.15 sigma around ``near``: some ratios are clipped, most are not."""
    return [
        with_columns(s, rollout_logprobs=p + 0.15 * s.columns["rollout_logprobs"])
        for s, p in zip(samples, near, strict=True)
    ]


def make_job(world: World, model: str | Path, flags: Sequence[str]) -> Job[RLRunConfig, RLPlan]:
    """A job as the RL entry would build it, on CPU unless told; nobody watches its phases.

    Dropout, which RL refuses, is allowed: the trainer has it in supervised runs.
    """
    device = os.environ.get("MINDSPEED_RL_TEST_PLATFORM", "cpu")
    argv = ["--hf-checkpoint", str(model), "--prompt-data", __file__, "--platform", device]
    argv += ["--max-prompt-length", "64", "--rollout-max-response-length", "64"]
    argv += ["--output-dir", str(Path(model).parent / "out")]
    argv += ["--train-iters", "1"]
    config = parse(RLRunConfig, [*argv, *flags], "test").config
    without_dropout = replace(config, model=replace(config.model, hidden_dropout=0.0))
    plan = plan_rl(without_dropout, world.size, files=False)  # nothing is tokenised here
    platform = select_platform(device)
    if device == "cpu":  # elsewhere the bootstrap has done it
        platform.install()
    watchdog = cast(Any, SimpleNamespace(phase=lambda *_: nullcontext()))
    minutes = config.parallel.distributed_timeout_minutes
    return Job(config, plan, world, platform, watchdog, (), minutes)


def start_job(world: World, model: str | Path, flags: Sequence[str]) -> Job[RLRunConfig, RLPlan]:
    """The same in a process whose grid of groups is there; the first job of a process makes it.

    Collective: the world.
    """
    from megatron.core import parallel_state

    from mindspeed_rl.building.models import initialize_parallel

    job = make_job(world, model, flags)
    if not parallel_state.model_parallel_is_initialized():
        initialize_parallel(job)
    return job


def train_world(
    world: World,
    layout: Sequence[str],
    cases: Sequence[Case],
    model: str,
    samples: Sequence[TrainSample],
) -> WorldResult | None:
    """Rank function: run all cases in one layout; the result is on rank 0."""
    from mindspeed_rl.building.models import build_engine

    results: dict[str, CaseResult] = {}
    for case in cases:
        job = start_job(world, case.model or model, [*layout, *case.flags])
        updates = max(1, case.num_steps)
        engine = build_engine(job, "policy", updates, job.config.rl.rl_default_temperature)
        results[case.name] = run_case(job, engine, case, samples)
    if world.rank:
        return None
    num_modules = len(megatron_modules())
    return WorldResult(results, unshimmed_modules(), num_modules, torch.cuda.is_available())


def megatron_modules() -> dict[str, ModuleType]:
    """The loaded modules of ``megatron.core``."""
    return {n: m for n, m in sys.modules.items() if n.split(".")[:2] == ["megatron", "core"]}


def unshimmed_modules() -> list[str]:
    """Those of them that hold the real torch instead of the facade of the CPU platform."""
    return [n for n, module in megatron_modules().items() if vars(module).get("torch") is torch]


def run_case(
    job: Job[RLRunConfig, RLPlan],
    engine: TrainEngine,
    case: Case,
    samples: Sequence[TrainSample],
) -> CaseResult:
    """Collective: the world. Every rank gets the gathered result; tensors are on rank 0 only."""
    from support.batches import local_batches

    batches = local_batches(job, engine, samples)
    if case.loss == "grpo":
        batches = with_reference(batches)
    annotated = engine.logprobs(batches)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    loss = make_loss(case, samples, seen)
    metrics = engine.forward_backward(batches, loss)
    gradients = in_hf_coordinates(job, _reduced_gradients(job, engine))
    logprobs, entropies = ([pair[i] for pair in seen] for i in (0, 1))
    first_pass = (logprobs, entropies, [t for t in annotated if t is not None])
    per_sample = (by_sample(engine, batches, tensors, len(samples)) for tensors in first_pass)
    values = dict(zip(("logprobs", "entropies", "annotated"), per_sample, strict=True))
    grad_norms = []
    for step in range(case.num_steps):
        if step:
            engine.forward_backward(batches, loss)
        grad_norms.append(engine.step().grad_norm)
    weights = in_hf_coordinates(job, engine.named_parameters()) if case.num_steps else {}
    return CaseResult(
        gradients=gradients,
        weights=weights,
        metrics=_merged(metrics),
        grad_norms=grad_norms,
        **values,
    )


def make_loss(
    case: Case,
    samples: Sequence[TrainSample],
    seen: list[tuple[torch.Tensor, torch.Tensor]],
) -> Any:
    """The case's loss; what it was given is appended to ``seen``."""
    counts = Denominators.of(s.num_trained for s in samples)

    def loss(inputs: LossInputs) -> LossOutputs:
        seen.append((inputs.logprobs.detach().clone(), inputs.entropy.detach().clone()))
        if case.loss == "sft":
            return supervised_loss(inputs, counts.tokens)
        return policy_loss(inputs, CLIP if case.loss == "grpo" else LossSettings(), counts)

    return loss


def in_hf_coordinates(
    job: Job[RLRunConfig, RLPlan], params: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Whole tensors by HF name on rank 0, fp32; empty elsewhere. Collective: the world."""
    rank, size = job.world.rank, job.world.size
    stream = TensorStream(
        job.plan.megatron,
        range(1),
        rank=rank,
        ranks_per_node=size,
        transport=AllToAllTransport(size, job.platform.device, None),
        dtype=torch.float32,
        bucket_bytes=1 << 20,
    )
    whole: dict[str, torch.Tensor] = {}
    stream.run(params, None if rank else whole.__setitem__)
    return {name: tensor.cpu() for name, tensor in whole.items()}


def with_reference(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The same with old log-probs and a reference's that are functions of the sample alone."""
    found = []
    for batch in batches:
        known = batch.column("rollout_logprobs")
        columns = {"old_logprobs": known, "ref_logprobs": known - 0.1}
        found.append(functools.reduce(lambda b, c: b.with_column(*c), columns.items(), batch))
    return found


def _reduced_gradients(
    job: Job[RLRunConfig, RLPlan], engine: TrainEngine
) -> dict[str, torch.Tensor]:
    """This rank's whole main gradients; the distributed optimizer leaves only a share of each."""
    from megatron.core import parallel_state

    if job.config.parallel.use_distributed_optimizer:
        dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
        experts = parallel_state.get_expert_data_parallel_group()
        for model in engine.models:
            _gather_shares(model.buffers, dense)
            _gather_shares(model.expert_parallel_buffers, experts)
    return engine.gradients()


def _gather_shares(buffers: Sequence[Any], group: dist.ProcessGroup) -> None:
    for buffer in buffers:
        for bucket in buffer.buckets:
            shares = bucket.grad_data.view(group.size(), -1)
            mine = shares[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)


def by_sample(
    engine: TrainEngine,
    batches: Sequence[MicroBatch],
    tensors: Sequence[torch.Tensor | None],
    num_samples: int,
) -> list[torch.Tensor]:
    """[N] per micro-batch -> one tensor per sample, gathered from the last stage of all ranks."""
    mine: dict[tuple[int, int], torch.Tensor] = {}
    if engine.is_last_stage:
        for prepared, tensor in zip(batches, tensors, strict=True):
            assert tensor is not None
            for i, sample_id in enumerate(prepared.sample_ids):
                own = prepared.sequence_of == i
                # a context-parallel rank has some of a sample's tokens, possibly none
                places = prepared.positions[prepared.loss_mask][own].tolist()
                for place, value in zip(places, tensor[own].cpu(), strict=True):
                    mine[sample_id, place] = value
    merged: dict[tuple[int, int], torch.Tensor] = {}
    for part in gather_objects(mine):
        for token, value in part.items():
            known = merged.setdefault(token, value)
            assert torch.equal(known, value), f"ranks differ in token {token}"
    return [
        torch.stack([merged[token] for token in sorted(merged) if token[0] == i])
        for i in range(num_samples)
    ]


def _merged(metrics: MetricSet) -> dict[str, float]:
    """The metrics of all ranks as numbers; ranks without the loss have none to give."""
    merged = functools.reduce(MetricSet.merge, gather_objects(metrics))
    return {
        name: metric.value for name, metric in merged.items() if isinstance(metric, (Mean, Max))
    }


def relative_errors(
    values: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """|v - ref| / |ref| by name, Euclidean norms in fp64."""
    assert values.keys() == reference.keys()
    return {
        name: float((values[name].double() - ref.double()).norm() / ref.double().norm())
        for name, ref in reference.items()
    }
