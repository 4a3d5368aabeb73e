"""Runs one megatron-core model with its optimizer: forward, backward, update, log-probs.

Policy, reference, critic and reward model are instances of :class:`TrainEngine`. Shapes: T packed
tokens of a micro-batch, N trained tokens in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray

from mindspeed_rl.adapters.modules import Adapters, MergedWeights
from mindspeed_rl.adapters.plan import MODULE
from mindspeed_rl.algorithms.lora import NO_ADAPTERS, LoraSettings
from mindspeed_rl.algorithms.types import LossInputs, LossOutputs, MaxTerm, MeanTerm, ValueInputs
from mindspeed_rl.attention.context import ContextGroup, context_group
from mindspeed_rl.attention.kernels import planner
from mindspeed_rl.attention.rows import make_packed_row
from mindspeed_rl.config import KernelConfig, ModelConfig, ParallelConfig, TrainConfig
from mindspeed_rl.config.context_parallel import context_parallelism
from mindspeed_rl.core.context_parallelism import ContextParallelism
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.metrics.metric_set import Max, Mean, Metric, MetricSet
from mindspeed_rl.platforms.base import Platform
from mindspeed_rl.samples.packing import (
    MicroBatch,
    padding_mask,
    sequence_of_tokens,
    split_context,
)
from mindspeed_rl.trainer.built_check import check_weights
from mindspeed_rl.trainer.dispatcher_caches import DispatcherCaches
from mindspeed_rl.trainer.heads import Outputs, make_head, policy_inputs, value_inputs
from mindspeed_rl.trainer.model import build_model, mixed_precision
from mindspeed_rl.trainer.model_config import build_transformer_config
from mindspeed_rl.trainer.observer import PassObserver
from mindspeed_rl.trainer.optimizer import LearningRateSchedule, build_optimizer
from mindspeed_rl.trainer.parallel_state import context_process_group
from mindspeed_rl.trainer.pipeline import planned_messages
from mindspeed_rl.trainer.routing_replay import RoutingReplay, router_places, routes_of
from mindspeed_rl.weight_layouts.megatron import MegatronLayout, chunk_prefix

ROUTER_BIAS = "router.expert_bias"
LossFunction = Callable[[LossInputs], LossOutputs]
ValueLossFunction = Callable[[ValueInputs], LossOutputs]
#: Roles whose weights are updated.
TRAINED_ROLES = ("policy", "critic")


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """The gradient norm and the learning rate of one optimizer step."""

    grad_norm: float
    learning_rate: float


class TrainEngine:
    """A model of one role on this rank.

    Args:
        role: A role of :data:`TRAINED_ROLES` trains; ``"reference"`` and ``"reward model"`` only
            compute.
        layout: Spec and parallel layout; the spec's head gives log-probs or values.
        platform: Platform of this rank's device.
        model: Model flags.
        parallel: Layout flags.
        kernels: Flags of fusions and overlap; ignored where the device lacks them.
        train: Optimizer flags.
        num_updates: Optimizer steps of the whole run, the horizon of the learning-rate schedule.
        temperature: Divisor of the logits in every log-prob.
        routing: With ``"replay"`` later passes over a micro-batch take the experts of the first
            pass; with ``"engine"`` the first pass also takes the engine's experts; with
            ``"compare"`` only the metrics report how many experts the passes share; ``"free"`` does
            none of this.
        force_balance: Whether tokens go to random experts in every pass, evenly, whatever the
            router says: for measurements of throughput.
        lora: Adapters, which are then all that is trained; weights have no gradients.
    """

    #: Looks at the numbers of every pass and update.
    observer = PassObserver()

    def __init__(
        self,
        role: str,
        *,
        layout: MegatronLayout,
        platform: Platform,
        model: ModelConfig,
        parallel: ParallelConfig,
        kernels: KernelConfig,
        train: TrainConfig,
        num_updates: int,
        temperature: float = 1.0,
        routing: str = "free",
        force_balance: bool = False,
        lora: LoraSettings = NO_ADAPTERS,
    ) -> None:
        self.role = role
        self.layout = layout
        self.spec = layout.spec
        self.platform = platform
        self.is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        features = platform.transformer_features()
        if lora.is_on:  # the kernel adds to the gradient of a weight, which has none
            kernels = replace(kernels, gradient_accumulation_fusion=False)
        config = build_transformer_config(layout, model, parallel, train, kernels, features)
        config.finalize_model_grads_func = _finalize_sums
        config.moe_router_force_load_balancing = force_balance
        self._config = config
        self._context_parallelism = context_parallelism(parallel)
        self._plan_attention = planner(
            features.packed_attention, config.params_dtype, config.attention_dropout
        )
        #: The chunks of this rank: one, or several with an interleaved pipeline.
        self.modules: list[Any] = [
            build_model(self.spec, layout, config, platform, chunk)
            for chunk in range(layout.parallel.stages.vpp)
        ]
        self._replay = _routing(self.modules, layout, routing) if self.spec.moe else None
        self._dispatcher_caches = DispatcherCaches(self.modules)
        self._accumulating = False
        #: How many times parameters were written from outside.
        self.num_writes = 0
        check_weights(self.named_parameters(), layout.local_shapes(dist.get_rank()))
        #: Adapters of the model; ``None``: there are none.
        self.adapters = Adapters(self.modules, layout, lora, train.seed) if lora.is_on else None
        overlaps = kernels.overlap_grad_reduce and role in TRAINED_ROLES
        overlaps &= features.overlaps_reduction
        self.head = make_head(
            self.modules[-1], self.spec, temperature, train.logprob_chunk_tokens, overlaps
        )
        wrapped = [mixed_precision(module, config) for module in self.modules]
        self.optimizer: Any = None
        self.models: list[Any] = wrapped
        if role in TRAINED_ROLES:
            self.models = _data_parallel(wrapped, config, parallel, train, overlaps)
            self.optimizer = build_optimizer(self.models, train, parallel)
            self.schedule = LearningRateSchedule(train, num_updates)
        else:
            for module in self.modules:
                module.requires_grad_(False)

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Return this rank's weights and router biases (buffers) by their names in the layout.

        Of a model with adapters these are the weights of the base.
        """
        weights: dict[str, torch.Tensor] = {}
        for chunk, module in enumerate(self.modules):
            prefix = chunk_prefix(chunk, len(self.modules))
            parameters = module.named_parameters()
            weights |= {prefix + n: p for n, p in parameters if not n.startswith(f"{MODULE}.")}
            weights |= {
                prefix + name: b for name, b in module.named_buffers() if name.endswith(ROUTER_BIAS)
            }
        return weights

    def merged_parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the weights that the model computes with: adapters are merged in. Local."""
        weights = self.named_parameters()
        return weights if self.adapters is None else MergedWeights(weights, self.adapters)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Let the model be its base, whose experts are its own choice. Local."""
        assert self.adapters is not None
        recorded = self._replay is not None and self._replay.records
        with self.adapters.off():
            if self._replay is not None:
                self._replay.records = False
            try:
                yield
            finally:
                if self._replay is not None:
                    self._replay.records = recorded

    def release_step_state(self) -> None:
        """Drop what the last step left on the device before gradient buffers are released. Local.

        Raises:
            RuntimeError: Gradients are accumulated that no step has used yet.
        """
        if self._accumulating:
            raise RuntimeError(
                f"{self.role}: gradients are accumulated and not yet used; call step() before the "
                "trainer gives its memory away"
            )
        self._dispatcher_caches.drop()
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the accumulated gradients, fp32, of this rank's weights by name; 0 if not trained.

        The distributed optimizer leaves each rank only a part of them.
        """
        weights = self.named_parameters()
        return {n: getattr(p, "main_grad", torch.zeros_like(p)) for n, p in weights.items()}

    def gather_gradients(self) -> None:
        """Complete what the distributed optimizer left of the reduced gradients of this rank.

        Collective: the data-parallel groups. The part that this rank updates keeps its bits.
        """
        for model in self.models:
            if not model.ddp_config.use_distributed_optimizer:
                continue
            for buffer in (*model.buffers, *model.expert_parallel_buffers):
                group = buffer.data_parallel_group
                for bucket in buffer.buckets:
                    shares = bucket.grad_data.view(group.size(), -1)
                    mine = shares[group.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)

    def reload_master_weights(self) -> None:
        """Update the master weights; call this after writing parameters from outside. Local.

        It also marks the host copy of a model that does not train as outdated.
        """
        self.num_writes += 1
        if self.optimizer is not None:
            self.platform.synchronize()  # a late copy would overwrite them
            self.optimizer.reload_model_params()

    def prepare(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Cut sequences to this rank's tokens and move them to the device. Local.

        Borders of attention are found when a pass begins, and are gone when it ends.
        """
        device, layers = self.platform.device, len(self.spec.expert_layers)
        prepared = []
        for batch in batches:
            context = self._context_of(batch)
            share = split_context(batch, context.size, context.rank).to(device)
            routes = None
            if self._replay is not None:
                padding = padding_mask(batch, context.size, context.rank)
                mine, of_rank = self._tokens_of_rank(share), None
                if padding is not None:
                    of_rank = torch.from_numpy(padding[mine.start : mine.stop])
                routes = routes_of(share, mine, layers, of_rank)
            prepared.append(replace(share, routes=routes))
        return prepared

    def _with_borders(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return prepared micro-batches with the borders of their sequences on the device."""
        device, plan = self.platform.device, self._plan_attention
        return [
            replace(
                batch,
                attention=make_packed_row(
                    batch.lengths, batch.positions, self._context_of(batch), plan
                ).to(device),
            )
            for batch in batches
        ]

    def places(self, batch: MicroBatch) -> tuple[NDArray[np.int64], range]:
        """Return which sequence the tokens of this rank belong to, and its rows of hidden states.

        Local.

        Args:
            batch: Prepared micro-batch of T tokens.

        Returns:
            [T], the index in ``batch.sample_ids``, -1 for padding; and the tokens whose hidden
            states this rank has between layers: a part of them under sequence parallelism.
        """
        context = self._context_of(batch)
        owners = sequence_of_tokens(batch, context.size, context.rank)
        return owners, self._tokens_of_rank(batch)

    def _context_of(self, batch: MicroBatch) -> ContextGroup:
        return context_of(batch, self.layout.parallel, self._context_parallelism, dist.get_rank())

    def _tokens_of_rank(self, batch: MicroBatch) -> range:
        """Return this rank's positions of a row under sequence parallelism, else all of them."""
        if not self._config.sequence_parallel:
            return range(batch.num_tokens)
        share = batch.num_tokens // self.layout.parallel.tp
        first = share * self.layout.parallel.coords(dist.get_rank()).tp
        return range(first, first + share)

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor | None]:
        """Return log p of the trained tokens, [N] fp32 per micro-batch.

        ``None`` off the last stage. Collective over the pipeline and tensor-parallel groups. No
        gradients, dropout off.
        """
        return [None if r is None else r[0] for r in self.outputs(batches)]

    values = logprobs  # of a model with a value head: the value before each trained token

    def outputs(self, batches: Sequence[MicroBatch]) -> list[Outputs | None]:
        """Return all that the head gives: log p and entropy, or values; see :meth:`logprobs`."""
        for model in self.models:
            model.eval()
        with torch.no_grad():
            results = self._run(batches, lambda batch, outputs: (outputs[0].sum(), outputs))
        for model in self.models:
            model.train()
        return results if self.is_last_stage else [None] * len(batches)

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss_function: LossFunction | ValueLossFunction
    ) -> MetricSet:
        """Accumulate the gradient of the summed losses of all micro-batches.

        Collective over the whole training grid; afterwards gradients are reduced over data
        parallelism. The loss function applies the global denominators.

        Returns:
            The metrics of this rank's micro-batches. Off the last stage and off the first
            tensor-parallel rank these are only those of replayed routing, as nothing may count
            twice.
        """
        self._accumulating = True
        loss_inputs: Any = value_inputs if self.spec.value_head else policy_inputs
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss(batch: MicroBatch, outputs: Outputs) -> tuple[torch.Tensor, LossOutputs]:
            reduce = functools.partial(self.all_reduce_row, batch)
            inputs = loss_inputs(batch, outputs, reduce)
            found = loss_function(inputs)
            return found.loss, replace(found, loss=found.loss.detach())

        with nullcontext() if self._replay is None else self._replay.update():
            outputs = self._run(batches, loss, backward=True)
        self.observer.reduced_gradients()
        metrics = collect_metrics(outputs) if self.is_metrics_rank else MetricSet()
        return metrics if self._replay is None else metrics.merge(self._replay.metrics())

    @property
    def is_metrics_rank(self) -> bool:
        """Whether this rank reports metrics of tokens that all tensor-parallel ranks share."""
        return bool(self.is_last_stage and parallel_state.get_tensor_model_parallel_rank() == 0)

    def all_reduce_row(self, batch: MicroBatch, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that share each sequence of a micro-batch, without gradient.

        Collective: the ranks that share its row.
        """
        context = self._context_of(batch)
        if context.size > 1:
            dist.all_reduce(values, group=context.group)
        return values

    def all_reduce_dp_cp(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of this stage that hold the other tokens of a step.

        Collective: the data- and context-parallel group.
        """
        if self.layout.parallel.dp * self.layout.parallel.cp > 1:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(values, group=group)
        return values

    def gradient_norm(self) -> float:
        """Return the norm of the accumulated gradients of all ranks, before they are clipped.

        Collective over the training grid. It is no finite number on any rank if a gradient on some
        rank is none.
        """
        self.platform.wait_for_copies()  # the optimizer state may still be on its way back
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def discard_gradients(self) -> None:
        """Leave out the update by the accumulated gradients; the schedule stays. Local."""
        self._accumulating = False

    def step(self) -> UpdateStats:
        """Clip gradients, update weights, advance the schedule. Collective over the training grid.

        The gradients must be finite, see :meth:`gradient_norm`.
        """
        self.platform.wait_for_copies()
        learning_rate = self.schedule.advance()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        _, grad_norm, _ = self.optimizer.step()
        self._accumulating = False
        self.observer.updated()
        return UpdateStats(float(grad_norm), learning_rate)

    def _run(
        self,
        batches: Sequence[MicroBatch],
        loss: Callable[[MicroBatch, Outputs], tuple[torch.Tensor, Any]],
        backward: bool = False,
    ) -> list[Any]:
        """Run all micro-batches and return the loss function's payloads, on the last stage only."""
        # The output projection needs hidden states in its own precision.
        precision = {"fp32_output": False} if self._config.bf16 else {}

        def forward(iterator: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
            batch = next(iterator)
            if self._replay is not None:
                self._replay.current = batch.routes
            with self.observer.forward(batch):
                hidden = model(
                    batch.token_ids[None].long(),
                    batch.positions[None],
                    None,
                    packed_seq_params=batch.attention,
                    **precision,
                )
            return hidden, functools.partial(self._loss, batch, loss)

        batches = self._with_borders(batches)
        self.observer.begin_pass(batches, backward=backward)
        single = len(self.models) == 1
        lengths = [len(self._tokens_of_rank(batch)) for batch in batches]
        # Only rows of equal length, on all context-parallel ranks, have messages of seq_length. For
        # others, such as hybrid rows, it is ignored: planned_messages has the shapes.
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches) if single else [iter(batches) for _ in self.models],
            model=self.models[0] if single else self.models,
            num_microbatches=len(batches),
            seq_length=batches[0].num_tokens * self.layout.parallel.cp,
            micro_batch_size=1,
            forward_only=not backward,
            **planned_messages(self._config, lengths),
        )
        return results

    def _loss(
        self, batch: MicroBatch, loss: Callable[..., Any], hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Turn hidden states [1, T, h] into (loss, 1, payload), as megatron-core asks."""
        outputs = self.head(batch, hidden)
        self.observer.outputs(batch, outputs)
        value, payload = loss(batch, outputs)
        return value, torch.ones((), dtype=torch.int), payload


def context_of(
    batch: MicroBatch, parallel: ParallelLayout, chosen: ContextParallelism, rank: int
) -> ContextGroup:
    """Return the ranks that share a row: as many neighbours as its plan has given it. Local.

    Args:
        batch: Micro-batch of this rank.
        parallel: Training layout, whose groups exist.
        chosen: Context parallelism of the run.
        rank: Global rank of this process.
    """
    size = batch.shared_by or parallel.cp
    place = parallel.coords(rank).cp % size
    return context_group(chosen.kind, size, place, chosen.ulysses, context_process_group(size))


def _routing(modules: Sequence[Any], layout: MegatronLayout, routing: str) -> RoutingReplay:
    """Return what the routers of this rank ask for experts; see :class:`TrainEngine`."""
    rank = dist.get_rank()
    assert layout.spec.moe is not None
    return RoutingReplay(
        modules,
        replays=routing in ("replay", "engine"),
        places=router_places(layout, rank) if routing == "engine" else (),
        records=routing != "free",
        first=rank * layout.spec.moe.top_k,
    )


def _finalize_sums(model: list[Any], num_tokens: Any = None, *args: Any, **kwargs: Any) -> None:
    """Reduce gradients as sums, because the losses contain the global denominator already."""
    finalize_model_grads(model, None, *args, **kwargs)


def _data_parallel(
    chunks: list[Any], config: Any, parallel: ParallelConfig, train: TrainConfig, overlaps: bool
) -> list[Any]:
    """Wrap the chunks of a model so that their gradients are summed over data-parallel ranks."""
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=overlaps,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        grad_reduce_in_fp32=train.bf16,
        # It would end one rank while the others wait; gradient_norm tells all of them.
        check_for_nan_in_grad=False,
    )
    models = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=chunk is not chunks[0])
        for chunk in chunks
    ]
    if overlaps:  # the schedule reduces what the last micro-batch has completed
        no_sync = [model.no_sync for model in models]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return models


def collect_metrics(outputs: Sequence[LossOutputs]) -> MetricSet:
    """Merge the terms of all micro-batches with a single transfer to the host."""
    flat = [
        part
        for output in outputs
        for term in output.terms.values()
        for part in ((term.sum, term.weight) if isinstance(term, MeanTerm) else (term.value,))
    ]
    numbers = iter(torch.stack([p.float() for p in flat]).tolist() if flat else [])
    metrics = MetricSet()
    for output in outputs:
        one: dict[str, Metric] = {}
        for name, term in output.terms.items():
            if isinstance(term, MaxTerm):
                one[name] = Max(next(numbers))
            else:
                one[name] = Mean(next(numbers), next(numbers))
        metrics = metrics.merge(one)
    return metrics
