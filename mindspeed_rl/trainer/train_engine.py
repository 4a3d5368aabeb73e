"""One megatron-core model with its optimizer: forward, backward, update, log-probs.

Policy, reference and critic are instances of :class:`TrainEngine`; there is no module state.
Shapes: T packed tokens of a micro-batch, N trained tokens in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from mindspeed_rl.algorithms.types import LossInputs, LossOutputs, MaxTerm, MeanTerm
from mindspeed_rl.config import ModelConfig, ParallelConfig, TrainConfig
from mindspeed_rl.data.packing import MicroBatch
from mindspeed_rl.observability.metrics import Max, Mean, Metric, MetricSet
from mindspeed_rl.platforms.base import Platform
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout
from mindspeed_rl.trainer.logprobs import selected_logprobs
from mindspeed_rl.trainer.model import build_model, build_transformer_config
from mindspeed_rl.trainer.optimizer import LearningRateSchedule, build_optimizer
from mindspeed_rl.trainer.packed_attention import PackedRow, make_packed_row

LossFunction = Callable[[LossInputs], LossOutputs]


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A micro-batch on the device with its attention borders; reused by every pass over it.

    ``old_logprobs`` and ``ref_logprobs`` are [N] fp32 on the last pipeline stage once computed.
    """

    batch: MicroBatch
    row: PackedRow
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """What one optimizer step did."""

    grad_norm: float
    learning_rate: float


class TrainEngine:
    """A model of one role on this rank.

    Args:
        role: ``"policy"`` trains, ``"reference"`` only computes log-probs.
        layout: spec and parallel layout.
        platform: the device.
        model: model flags.
        parallel: layout flags.
        train: optimizer flags.
        num_updates: optimizer steps of the whole run: the horizon of the schedule (R47).
        temperature: logits are divided by it in every log-prob (R9).
    """

    def __init__(
        self,
        role: str,
        *,
        layout: MegatronLayout,
        platform: Platform,
        model: ModelConfig,
        parallel: ParallelConfig,
        train: TrainConfig,
        num_updates: int,
        temperature: float = 1.0,
    ) -> None:
        self.role = role
        self.layout = layout
        self.spec = layout.spec
        self.platform = platform
        self.temperature = temperature
        self._train = train
        self.is_first = parallel_state.is_pipeline_first_stage()
        self.is_last = parallel_state.is_pipeline_last_stage()
        config = build_transformer_config(
            self.spec, layout.parallel, model, train.bf16, parallel.shards_sequence
        )
        config.finalize_model_grads_func = _finalize_sums
        self._config = config
        stage = (self.is_first, self.is_last)
        module = build_model(self.spec, layout, config, train, platform.device, stage)
        self.module: Any = module
        self.optimizer: Any = None
        if role == "policy":
            self.model: Any = DistributedDataParallel(
                config, _ddp_config(parallel, train), _mixed_precision(module, config)
            )
            self.optimizer = build_optimizer(self.model, train, parallel)
            self.schedule = LearningRateSchedule(train, num_updates)
        else:
            module.requires_grad_(False)
            self.model = _mixed_precision(module, config)

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """This rank's parameters by megatron-core name, as the layout names them."""
        return dict(self.module.named_parameters())

    def weights_changed(self) -> None:
        """Call after writing parameters from outside: master weights follow. Local."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def prepare(self, batches: Sequence[MicroBatch]) -> list[PreparedBatch]:
        """Move micro-batches to the device and find their attention borders. Local."""
        device = self.platform.device
        prepared = []
        for batch in batches:
            row = make_packed_row(batch.lengths, batch.positions)
            tensors = {
                name: getattr(batch, name).to(device)
                for name in ("token_ids", "positions", "targets", "loss_mask")
            }
            tensors |= {
                name: getattr(batch, name).to(device)
                for name in ("rollout_logprobs", "advantages", "sequence_of")
            }
            prepared.append(PreparedBatch(replace(batch, **tensors), _row_to(row, device)))
        return prepared

    def logprobs(self, batches: Sequence[PreparedBatch]) -> list[torch.Tensor | None]:
        """log p of the trained tokens, [N] fp32 per micro-batch; ``None`` off the last stage.

        Collective over the pipeline and tensor-parallel groups. No gradients, dropout off.
        """
        self.model.eval()
        with torch.no_grad():
            results = self._run(batches, lambda batch, logp, entropy: (logp.sum(), logp))
        self.model.train()
        return results if self.is_last else [None] * len(batches)

    def forward_backward(
        self, batches: Sequence[PreparedBatch], loss_function: LossFunction
    ) -> MetricSet:
        """Accumulate the gradient of the summed losses of all micro-batches.

        Collective over the whole training grid; afterwards gradients are reduced over data
        parallelism. The loss function carries the global denominators.

        Returns:
            The metrics of this rank's micro-batches; empty off the last stage and off the first
            tensor-parallel rank, so that nothing is counted twice.
        """
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss(
            prepared: PreparedBatch, logp: torch.Tensor, entropy: torch.Tensor
        ) -> tuple[torch.Tensor, LossOutputs]:
            batch = prepared.batch
            outputs = loss_function(
                LossInputs(
                    logprobs=logp,
                    entropy=entropy,
                    old_logprobs=prepared.old_logprobs,
                    rollout_logprobs=batch.rollout_logprobs,
                    ref_logprobs=prepared.ref_logprobs,
                    advantages=batch.advantages,
                )
            )
            return outputs.loss, replace(outputs, loss=outputs.loss.detach())

        outputs = self._run(batches, loss, backward=True)
        if self.is_last and parallel_state.get_tensor_model_parallel_rank() == 0:
            return _collect_metrics(outputs)
        return MetricSet()

    def step(self) -> UpdateStats:
        """Clip, update, advance the schedule. Collective over the training grid.

        Raises:
            FloatingPointError: the gradient norm is not finite; nothing was updated.
        """
        learning_rate = self.schedule.advance()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        updated, grad_norm, _ = self.optimizer.step()
        if not updated or not _finite(grad_norm):
            raise FloatingPointError(
                f"{self.role}: gradient norm {grad_norm} at update {self.schedule.num_updates}; "
                "lower --lr or look at the rewards of this step in rollouts.jsonl"
            )
        return UpdateStats(float(grad_norm), learning_rate)

    def _run(
        self,
        batches: Sequence[PreparedBatch],
        loss: Callable[[PreparedBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Any]],
        backward: bool = False,
    ) -> list[Any]:
        """Run all micro-batches; the loss function's payloads, on the last stage."""
        # the output projection works on hidden states of its own precision
        precision = {"fp32_output": False} if self._config.bf16 else {}

        def forward(iterator: Iterator[PreparedBatch], model: Any) -> tuple[torch.Tensor, Any]:
            prepared = next(iterator)
            batch = prepared.batch
            hidden = model(
                batch.token_ids[None],
                batch.positions[None],
                None,
                packed_seq_params=prepared.row,
                **precision,
            )
            return hidden, functools.partial(self._loss, prepared, loss)

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=self.model,
            num_microbatches=len(batches),
            seq_length=batches[0].batch.num_tokens,
            micro_batch_size=1,
            forward_only=not backward,
        )
        return results

    def _loss(
        self, prepared: PreparedBatch, loss: Callable[..., Any], hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Hidden states [1, T, h] of the last stage -> (loss, 1, payload) for megatron-core."""
        batch = prepared.batch
        rows = hidden[0]
        if self._config.sequence_parallel:
            rows = gather_from_sequence_parallel_region(rows)
        else:
            rows = copy_to_tensor_model_parallel_region(rows)
        tp_size = self.layout.parallel.tp
        logp, entropy = selected_logprobs(
            rows[batch.loss_mask],
            self._output_weight(),
            batch.targets[batch.loss_mask],
            temperature=self.temperature,
            vocab_size=self.spec.vocab_size,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            group=parallel_state.get_tensor_model_parallel_group() if tp_size > 1 else None,
            chunk=self._train.logprob_chunk_tokens,
        )
        value, payload = loss(prepared, logp, entropy)
        return value, torch.ones((), dtype=torch.int), payload

    def _output_weight(self) -> torch.Tensor:
        if self.module.share_embeddings_and_output_weights:
            weight: torch.Tensor = self.module.shared_embedding_or_output_weight()
            return weight
        return self.module.output_layer.weight  # type: ignore[no-any-return]


def _finalize_sums(model: list[Any], num_tokens: Any = None, *args: Any, **kwargs: Any) -> None:
    """Reduce gradients as sums: our losses carry the global denominator already (R35)."""
    finalize_model_grads(model, None, *args, **kwargs)


def _ddp_config(parallel: ParallelConfig, train: TrainConfig) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        grad_reduce_in_fp32=train.bf16,
        check_for_nan_in_grad=True,
    )


def _mixed_precision(module: Any, config: Any) -> Any:
    if not config.bf16:
        return module
    from megatron.core.transformer.module import Float16Module

    return Float16Module(config, module)


def _row_to(row: PackedRow, device: torch.device) -> PackedRow:
    if device.type == "cpu":
        return row
    groups = tuple(
        replace(g, index=g.index.to(device), real=None if g.real is None else g.real.to(device))
        for g in row.groups
    )
    return replace(
        row, positions=row.positions.to(device), groups=groups, order=row.order.to(device)
    )


def _finite(value: float | torch.Tensor) -> bool:
    return bool(torch.isfinite(torch.as_tensor(value)).all())


def _collect_metrics(outputs: Sequence[LossOutputs]) -> MetricSet:
    """One transfer to the host for all terms of all micro-batches."""
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
