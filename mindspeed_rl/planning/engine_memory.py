"""Bytes of the rollout engine on one rank: weights, key/value cache, work space."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.models.layers import MLP, DenseMLP, LatentAttention, MoE
from mindspeed_rl.models.rules import round_up
from mindspeed_rl.rollout.provider import EngineSizes
from mindspeed_rl.weights.layouts.rollout import RolloutLayout

_FP32 = 4
# [sequences, vocabulary] in fp32 while tokens are sampled: logits, probabilities, noise.
_SAMPLING_COPIES = 3


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The engine of one layout.

    Attributes:
        layout: spec and rollout layout.
        item: bytes of an element of weights and cache.
        sizes: what its options and habits say.
        kv_cache_bytes: what is asked for on each rank.
        imbalance: tokens that the busiest rank of the experts gets, by the mean.
    """

    layout: RolloutLayout
    item: int
    sizes: EngineSizes
    kv_cache_bytes: int
    imbalance: float = 1.0

    def weights(self, rank: int) -> int:
        """Parameters of a rank, padding included, and copies that the engine derives from them."""
        return sum(self.layout.local_bytes(rank, self.item).values()) + self._latent_copies()

    def _latent_copies(self) -> int:
        if not self.sizes.copies_latent:
            return 0
        attentions = (layer.attention for layer in self.layout.spec.layers)
        latent = (x for x in attentions if isinstance(x, LatentAttention))
        copied = sum(x.kv_b_size * x.kv_lora_rank for x in latent)
        return copied // self.layout.engine.tp * self.item

    def token_bytes(self) -> int:
        """Cache of one token on a rank, all layers."""
        return self.layout.spec.cached_values(self.layout.engine.tp) * self.item

    def kv_cache(self) -> int:
        """What is asked for in whole blocks of all layers, as engines allocate it."""
        block = self.token_bytes() * self.sizes.block_tokens
        return self.kv_cache_bytes // block * block

    def routed_tokens(self, moe: MoE) -> int:
        """Copies of tokens that the busiest rank computes in one layer with these experts."""
        engine = self.layout.engine
        copies = self.sizes.batched_tokens * engine.dp * moe.top_k
        if not engine.expert_parallel:
            return copies  # every rank has a slice of every expert
        return int(copies / engine.size * self.imbalance)

    def workspace(self) -> int:
        """The largest moment of an engine step of the most tokens.

        Residual stream and normed input, and the larger of attention (projections of queries, keys
        and values, output) and MLP (gate, up, activated). Experts add what they take and give back
        ([routed, hidden] each), both halves and the activated product, and the copies that the
        rank sends. Sampling holds logits of all sequences in fp32. Nothing is kept over layers.
        """
        spec, tp, item = self.layout.spec, self.layout.engine.tp, self.item
        tokens = self.sizes.batched_tokens
        stream = 2 * tokens * spec.hidden_size
        widest = max(
            max(tokens * layer.attention.engine_values // tp, self._mlp_values(layer.mlp))
            for layer in dict.fromkeys(spec.layers)
        )
        layers = (stream + widest) * item
        vocab = round_up(spec.vocab_size, self.layout.vocab_multiple)
        sampling = min(self.sizes.sequences, tokens) * vocab * _FP32 * _SAMPLING_COPIES
        return max(layers, stream * item + sampling)

    def _mlp_values(self, mlp: MLP) -> int:
        """Elements that one MLP works with."""
        engine, tokens = self.layout.engine, self.sizes.batched_tokens
        if isinstance(mlp, DenseMLP):
            return tokens * 3 * mlp.ffn_hidden_size // engine.tp
        hidden, width = self.layout.spec.hidden_size, mlp.expert_ffn_size // engine.expert_tp
        sent = tokens * mlp.top_k // engine.tp if engine.expert_parallel else 0
        experts = self.routed_tokens(mlp) * (2 * hidden + 3 * width) + sent * hidden
        return experts + tokens * 3 * mlp.shared_ffn_size // engine.tp
