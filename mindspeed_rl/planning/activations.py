"""Predicts the activations of a training step: bytes that layers keep, and working memory.

A model is a list of layers. Each keeps bytes for its backward pass by part, as fused kernels do
(flash attention, fused norms and gated activation): inputs of operators and row statistics. Plain
PyTorch operators keep up to twice as much.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl.config import TrainConfig
from mindspeed_rl.core.context_parallelism import GATHERED, ContextParallelism
from mindspeed_rl.core.layout import round_up
from mindspeed_rl.core.logit_tiles import LogitTile, logit_tile
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

_FP32 = 4
# Bytes of a prepared micro-batch per token: ids, positions, targets, mask; of its borders, which
# live for a pass (3 indices); and per trained token: log-probs of engine, old policy and reference,
# advantage, 3 indices.
_TOKEN_BYTES, _BORDER_BYTES, _TRAINED_BYTES = 3 * 4 + 1, 3 * 4, 4 * 4 + 3 * 4


@dataclass(frozen=True, slots=True)
class Workload:
    """One optimizer step on one rank.

    Attributes:
        tokens: Tokens of a micro-batch on all context-parallel ranks, padding included, if each had
            as many as the fullest one.
        trained: Those that have a loss.
        num_micro_batches: Micro-batches of the optimizer step.
        entropy_gradient: Whether the loss has an entropy term.
        num_updates: Optimizer steps whose micro-batches are prepared together.
        state_bytes: Bytes that teachers add to a trained token, on the last stage.
    """

    tokens: int
    trained: int
    num_micro_batches: int
    entropy_gradient: bool = False
    num_updates: int = 1
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TrainPeak:
    """Bytes at the fullest moment of a step, besides the model's state.

    Attributes:
        activations: Kept activations, working memory, and packed micro-batches of all updates.
        logits: Further bytes where the fullest moment is in the log-probs.
    """

    activations: int
    logits: int


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """A training layout with the flags and the expert imbalance that decide its activations.

    ``on_host``: Whether a CPU computes.
    """

    layout: MegatronLayout
    train: TrainConfig
    shards_sequence: bool
    imbalance: float = 1.0
    on_host: bool = False
    context: ContextParallelism = GATHERED

    def peak(self, rank: int, work: Workload) -> TrainPeak:
        """Return the bytes at the fullest moment of an optimizer step of a rank. Pure.

        All micro-batches in flight keep activations; the newest needs working memory as well, of
        one layer or of the head.
        """
        parallel = self.layout.parallel
        stage, vpp = parallel.coords(rank).pp, parallel.stages.vpp
        chunks = [parallel.stages.layers_of(stage, chunk) for chunk in range(vpp)]
        in_flight = Counter(chunks_in_flight(stage, parallel.pp, vpp, work.num_micro_batches))
        kept = sum(self.kept_by(chunks[chunk], work) * n for chunk, n in in_flight.items())
        working = max(self._working(layers, work) for layers in chunks)
        is_last = stage == parallel.pp - 1
        head = self._head(work) if is_last else 0
        tokens = work.tokens // parallel.cp
        per_trained = _TRAINED_BYTES + (work.state_bytes if is_last else 0)
        batch = _TOKEN_BYTES * tokens + per_trained * self._trained(work)
        borders = _BORDER_BYTES * tokens
        waiting = (batch * work.num_updates + borders) * work.num_micro_batches
        return TrainPeak(kept + working + waiting, max(0, head - working))

    def inference(self, rank: int, work: Workload) -> int:
        """Return the largest bytes of a pass that keeps nothing: of one layer, or the logits."""
        parallel = self.layout.parallel
        stage = parallel.coords(rank).pp
        layers = (
            n for c in range(parallel.stages.vpp) for n in parallel.stages.layers_of(stage, c)
        )
        largest = max(sum(self.layer_parts(layer, work).values()) for layer in layers)
        return max(largest, 3 * self._logits(work) if stage == parallel.pp - 1 else 0)

    def kept_by(self, layers: range, work: Workload) -> int:
        """Return the bytes that a chunk keeps of one micro-batch for its backward pass."""
        train = self.train
        residual = self._residual(work)
        plain = [sum(self.layer_parts(layer, work).values()) for layer in layers]
        if train.recompute_granularity == "selective":
            return sum(size - self._again(n, work) for n, size in zip(layers, plain, strict=True))
        if train.recompute_granularity == "full":
            count = train.recompute_num_layers or 1
            if train.recompute_method == "uniform":
                return residual * -(-len(plain) // count)
            return residual * len(plain[:count]) + sum(plain[count:])
        return sum(plain)

    def layer_parts(self, layer: int, work: Workload) -> dict[str, int]:
        """Return the bytes that one layer keeps, by part as named in ``--recompute-modules``."""
        spec, parallel = self.layout.spec, self.layout.parallel
        tokens, item, tp = work.tokens // parallel.cp, self._item, parallel.tp
        attention, mlp = spec.layers[layer].attention, spec.layers[layer].mlp
        local = self._local_tokens(work)
        # copies of tokens from all ranks that this rank's experts process
        taken = local * mlp.top_k * parallel.etp
        taken = int(taken * (self.imbalance if parallel.ep > 1 else 1.0))
        experts = taken * (spec.hidden_size + mlp.copy_values // parallel.etp)
        every_token = tokens * mlp.saved_values // tp
        return {
            # inputs of both norms and of the projections after them
            "stream": 4 * self._residual(work),
            "attention": tokens * attention.saved_values // tp * item,
            "core_attn": tokens * attention.num_heads // tp * _FP32  # row statistics
            + tokens * self._key_values(layer) * (self._copies_of_keys(layer) - 1) * item,
            mlp.recompute_module: (experts + every_token) * item
            + local * mlp.routing_values * _FP32,
        }

    def _key_values(self, layer: int) -> int:
        """Return the elements of keys and values of a token on a rank."""
        attention, tp = self.layout.spec.layers[layer].attention, self.layout.parallel.tp
        channels = attention.head_dim + attention.attention_size // attention.num_heads
        return max(1, attention.num_kv_heads // tp) * channels

    def _copies_of_keys(self, layer: int) -> int:
        """Return how many times its own keys and values a rank keeps for the backward pass.

        Where all ranks gather them it keeps those of all. Ranks that exchange tokens for heads keep
        as many as before, unless key heads had to be repeated. A ring keeps its own.
        """
        if self.context.kind == "all_gather":
            return self.layout.parallel.cp
        attention = self.layout.spec.layers[layer].attention
        heads = max(1, attention.num_kv_heads // self.layout.parallel.tp)
        return self.context.ulysses // math.gcd(self.context.ulysses, heads)

    def context_buffers(self, layer: int, work: Workload) -> int:
        """Return what context parallelism needs for a moment in the backward pass of a layer.

        Gathered keys and values have a copy in the order of their sequences, and gradients of
        their size in that order and in the order of ranks. A ring has two buffers of keys and
        values, two of their gradients in fp32, and those of the queries in fp32; of one block also
        gradients of keys and values in both orders, and queries, output and gradient in order.
        Ranks that exchange tokens for heads have a copy to send.
        """
        parallel, attention = self.layout.parallel, self.layout.spec.layers[layer].attention
        if parallel.cp == 1:
            return 0
        tokens = work.tokens // parallel.cp
        keys = self._key_values(layer) * self._copies_of_keys(layer)
        queries = attention.num_heads * attention.head_dim // parallel.tp
        if self.context.kind == "all_gather":
            return 3 * tokens * keys * self._item
        exchanged = (queries + keys) * self._item if self.context.ulysses > 1 else 0
        if self.context.ring == 1:
            return tokens * exchanged
        ring = 2 * keys * (self._item + _FP32) + queries * _FP32
        block = (2 * keys + 3 * queries) * self._item
        return tokens * (exchanged + ring + block)

    def _again(self, layer: int, work: Workload) -> int:
        """Return the bytes of a layer that ``--recompute-modules`` recomputes and does not keep."""
        parts = self.layer_parts(layer, work)
        return sum(parts.get(name, 0) for name in self.train.recompute_modules)

    def _working(self, layers: range, work: Workload) -> int:
        """Return the working memory of the fullest layer in its backward pass.

        It has the gradients of the widest part, as large as the bytes which that part keeps, the
        gathered stream, what context parallelism needs, and recomputed activations.
        """
        gathered = (
            work.tokens // self.layout.parallel.cp * self.layout.spec.hidden_size * self._item
        )
        sizes = [self.layer_parts(layer, work) for layer in layers]
        working = max((max(parts.values()) for parts in sizes), default=0) + 2 * gathered
        working += max((self.context_buffers(layer, work) for layer in layers), default=0)
        if self.train.recompute_granularity == "full":
            uniform = self.train.recompute_method == "uniform"
            unit = (self.train.recompute_num_layers or 1) if uniform else 1
            units = (sizes[first : first + unit] for first in range(0, len(sizes), unit))
            return working + max((sum(sum(p.values()) for p in u) for u in units), default=0)
        if self.train.recompute_granularity == "selective":
            return working + max((self._again(layer, work) for layer in layers), default=0)
        return working

    def _head(self, work: Workload) -> int:
        """Return the bytes of the head: blocks of logits, gradients of weight and hidden states."""
        spec = self.layout.spec
        states = self._trained(work) * spec.hidden_size * _FP32
        if spec.value_head:
            return 2 * states
        # The gradient of the ids of a block; those of all ids are added up in the model's state.
        weight = self._tile(work).columns * spec.hidden_size
        matrices = 4 if work.entropy_gradient else 3
        return matrices * self._logits(work) + weight * (_FP32 + self._item) + 2 * states

    def _logits(self, work: Workload) -> int:
        """Return the bytes of one block of logits in fp32; a value head has none."""
        return 0 if self.layout.spec.value_head else self._tile(work).num_bytes

    def _tile(self, work: Workload) -> LogitTile:
        chunk, trained = self.train.logprob_chunk_tokens, self._trained(work)
        return logit_tile(chunk, trained, self._vocab_rows, on_host=self.on_host)

    @property
    def _vocab_rows(self) -> int:
        rows = round_up(self.layout.spec.vocab_size, self.layout.vocab_multiple)
        return rows // self.layout.parallel.tp

    @property
    def _item(self) -> int:
        return 2 if self.train.bf16 else _FP32

    def _trained(self, work: Workload) -> int:
        return work.trained // self.layout.parallel.cp

    def _local_tokens(self, work: Workload) -> int:
        """Return the tokens of the residual stream on a rank."""
        parallel = self.layout.parallel
        return work.tokens // parallel.cp // (parallel.tp if self.shards_sequence else 1)

    def _residual(self, work: Workload) -> int:
        return self._local_tokens(work) * self.layout.spec.hidden_size * self._item


def chunks_in_flight(stage: int, pp: int, vpp: int, num_micro_batches: int) -> Sequence[int]:
    """Return the chunk of every forward pass without its backward pass, at the fullest moment.

    The schedule is one-forward-one-backward, plain or interleaved (Narayanan et al. 2021,
    arXiv:2104.04473).
    """
    if vpp == 1:
        return [0] * min(num_micro_batches, pp - stage)
    total = num_micro_batches * vpp
    deepest = min(total, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1)
    return [k % (pp * vpp) // pp for k in range(deepest)]
