"""The largest moment of a training step on one rank: activations and logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed_rl.config import TrainConfig
from mindspeed_rl.memory.head import HeadSizes, head_step, value_step
from mindspeed_rl.memory.layers import Kernels, LayerSizes, layer_tape, left_by_dispatcher
from mindspeed_rl.memory.tape import Step, backward_peak, forward_peak, kept_bytes, recomputed
from mindspeed_rl.models.rules import round_up
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout

# What a prepared micro-batch holds per token: ids, positions, targets, mask, borders; per trained
# token: log-probs of engine, old policy and reference, advantage, sequence.
_TOKEN_BYTES, _TRAINED_BYTES = 6 * 8 + 1, 4 * 4 + 8


@dataclass(frozen=True, slots=True)
class Workload:
    """One optimizer step on one rank.

    Attributes:
        tokens: of a micro-batch, of all context-parallel ranks, padding included.
        sequence: tokens of the longest sequence in it.
        trained: tokens of it with a loss.
        num_micro_batches: of the optimizer step.
        num_updates: optimizer steps whose micro-batches are prepared together.
        entropy_gradient: whether the loss has an entropy term.
    """

    tokens: int
    sequence: int
    trained: int
    num_micro_batches: int
    entropy_gradient: bool = False
    num_updates: int = 1


@dataclass(frozen=True, slots=True)
class TrainPeak:
    """Bytes at the largest moment of a step, besides the model's state.

    Attributes:
        activations: kept, and worked with.
        logits: on top, where the largest moment is in the log-probs.
        batch: packed micro-batches of all updates, which wait from before the first.
    """

    activations: int
    logits: int
    batch: int

    @property
    def in_step(self) -> int:
        """What a step makes itself."""
        return self.activations + self.logits


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """A training layout with everything that its activations follow from."""

    layout: MegatronLayout
    train: TrainConfig
    kernels: Kernels
    shards_sequence: bool
    imbalance: float = 1.0

    def peak(self, rank: int, work: Workload) -> TrainPeak:
        """The largest moment of an optimizer step of a rank. Pure."""
        with_logits = self._peak(rank, work, logits=True)
        without = self._peak(rank, work, logits=False)
        cp = self.layout.parallel.cp
        per_micro_batch = _TOKEN_BYTES * work.tokens // cp + _TRAINED_BYTES * work.trained // cp
        waiting = per_micro_batch * work.num_micro_batches * work.num_updates
        return TrainPeak(without, with_logits - without, waiting)

    def _peak(self, rank: int, work: Workload, *, logits: bool) -> int:
        tapes = self.chunk_tapes(rank, work, logits=logits)
        stage = self.layout.parallel.coords(rank).pp
        flight = chunks_in_flight(
            stage, self.layout.parallel.pp, len(tapes), work.num_micro_batches
        )
        counts = Counter(flight[:-1])
        waiting = sum(kept_bytes(tapes[chunk]) * count for chunk, count in counts.items())
        persistent = self.layer_sizes(work).gathering  # megatron-core's buffer for gathered inputs
        return (
            waiting
            + persistent
            + max(max(forward_peak(tape), backward_peak(tape)) for tape in tapes)
        )

    def chunk_tapes(self, rank: int, work: Workload, *, logits: bool = True) -> list[list[Step]]:
        """The tape of every chunk of a rank's stage."""
        parallel = self.layout.parallel
        stages, stage = parallel.stages, parallel.coords(rank).pp
        sizes = self.layer_sizes(work)
        tapes = []
        for chunk in range(stages.vpp):
            first = stage == 0 and chunk == 0
            last = stage == parallel.pp - 1 and chunk == stages.vpp - 1
            body = self._layers(sizes, stages.layers_of(stage, chunk))
            begin = self._begin(sizes, first)
            end = self._end(sizes, work, logits) if last else [_sent(sizes)]
            if first and last and self.layout.spec.tie_embeddings:
                # the gradient of the head waits for that of the embedding, the same parameter
                body = [replace(step, backward=step.backward + self._table(sizes)) for step in body]
            tapes.append([begin, *body, *end])
        return tapes

    def layer_sizes(self, work: Workload) -> LayerSizes:
        """The sizes of this rank's share of a micro-batch."""
        parallel, train = self.layout.parallel, self.train
        selective = train.recompute_granularity == "selective"
        return LayerSizes(
            spec=self.layout.spec,
            kernels=self.kernels,
            tokens=work.tokens // parallel.cp,
            sequence=work.sequence,
            tp=parallel.tp,
            etp=parallel.etp,
            ep=parallel.ep,
            shards_sequence=self.shards_sequence,
            item=2 if train.bf16 else 4,
            imbalance=self.imbalance,
            recompute_modules=train.recompute_modules if selective else (),
        )

    def _layers(self, sizes: LayerSizes, layers: range) -> list[Step]:
        """The layers of a chunk; recomputed ones as one step per unit."""
        train = self.train
        tapes = [layer_tape(sizes, layer) for layer in layers]
        if train.recompute_granularity != "full":
            return [step for tape in tapes for step in tape]
        count = train.recompute_num_layers or 1
        uniform = train.recompute_method == "uniform"
        unit, covered = (count, len(tapes)) if uniform else (1, min(count, len(tapes)))
        steps = []
        # the first norm keeps the kept input itself, unless it needs it in fp32
        own = 0 if not sizes.fused and sizes.item < 4 else sizes.residual
        for first in range(0, covered, unit):
            inside = [step for tape in tapes[first : first + unit] for step in tape]
            inside[0] = replace(inside[0], kept=inside[0].kept - own)
            experts = any(sizes.spec.has_experts(n) for n in layers[first : first + unit])
            left = left_by_dispatcher(sizes) if experts else 0
            size = sizes.residual
            steps.append(recomputed("recomputed layers", inside, size, size, left))
        return steps + [step for tape in tapes[covered:] for step in tape]

    def _vocab_rows(self) -> int:
        parallel, spec = self.layout.parallel, self.layout.spec
        return round_up(spec.vocab_size, self.layout.vocab_multiple) // parallel.tp

    def _table(self, sizes: LayerSizes) -> int:
        """Bytes of a gradient of the embedding."""
        return self._vocab_rows() * self.layout.spec.hidden_size * sizes.item

    def _begin(self, sizes: LayerSizes, first: bool) -> Step:
        full = self.train.recompute_granularity == "full"
        if first:
            backward = self._table(sizes) + sizes.residual
            return Step("embedding", 0, sizes.gathering + sizes.residual, backward)
        # a layer that keeps its input in this precision, or that is recomputed, keeps this tensor
        same = full or sizes.fused or sizes.item == 4
        return Step("received", 0 if same else sizes.residual, 0, 2 * sizes.residual)

    def _end(self, sizes: LayerSizes, work: Workload, logits: bool) -> list[Step]:
        spec, parallel = self.layout.spec, self.layout.parallel
        elements = sizes.local_tokens * spec.hidden_size
        stats = sizes.local_tokens * 4
        if sizes.fused:
            norm = Step("final norm", elements * sizes.item + stats, sizes.residual)
        else:
            norm = Step("final norm", 8 * elements + stats, sizes.residual, 3 * 4 * elements)
        if spec.value_head:
            trained = work.trained // parallel.cp
            return [norm, value_step(trained, spec.hidden_size, sizes.item, sizes.gathering)]
        head = head_step(
            HeadSizes(
                trained=work.trained // parallel.cp,
                hidden=spec.hidden_size,
                vocab=self._vocab_rows(),
                chunk=self.train.logprob_chunk_tokens,
                item=sizes.item,
                entropy_gradient=work.entropy_gradient,
                hidden_states=sizes.residual + sizes.gathering,
            )
        )
        return [norm, head if logits else replace(head, forward=0, backward=0)]


def _sent(sizes: LayerSizes) -> Step:
    """The output of a stage, which waits beside its gradient."""
    return Step("sent", sizes.residual, 0, sizes.residual)


def chunks_in_flight(stage: int, pp: int, vpp: int, num_micro_batches: int) -> Sequence[int]:
    """The chunk of every micro-batch that has run forward and not backward, at the fullest moment.

    Of the one-forward-one-backward schedule, plain or interleaved (Narayanan et al. 2021,
    arXiv:2104.04473).
    """
    if vpp == 1:
        return [0] * min(num_micro_batches, pp - stage)
    total = num_micro_batches * vpp
    deepest = min(total, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1)
    return [k % (pp * vpp) // pp for k in range(deepest)]
