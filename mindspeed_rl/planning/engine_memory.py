"""Bytes of the rollout engine on one rank: weights, key/value cache, work space."""

from __future__ import annotations

from dataclasses import dataclass

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
        spec, engine = self.layout.spec, self.layout.engine
        layers = -(-spec.num_layers // engine.pp)
        return layers * spec.kv_b_size * spec.kv_lora_rank // engine.tp * self.item

    def token_bytes(self) -> int:
        """Cache of one token on a rank, all its layers."""
        spec, engine = self.layout.spec, self.layout.engine
        layers = -(-spec.num_layers // engine.pp)
        return layers * spec.cached_values(engine.tp) * self.item

    def kv_cache(self) -> int:
        """What is asked for in whole blocks of all layers, as engines allocate it."""
        block = self.token_bytes() * self.sizes.block_tokens
        return self.kv_cache_bytes // block * block

    def routed_tokens(self) -> int:
        """Copies of tokens that the busiest rank computes in one layer with experts."""
        spec, engine = self.layout.spec, self.layout.engine
        if spec.moe is None:
            return 0
        copies = self.sizes.batched_tokens * engine.dp * spec.moe.top_k
        if not engine.expert_parallel:
            return copies  # every rank has a slice of every expert
        return int(copies / engine.expert_ranks * self.imbalance)

    def workspace(self) -> int:
        """The largest moment of an engine step of the most tokens.

        Residual stream and normed input, and the larger of attention (projections of queries, keys
        and values, output) and MLP (gate, up, activated). Experts add what they take and give back
        ([routed, hidden] each), both halves and the activated product, and the copies that the
        rank sends. Sampling holds logits of all sequences in fp32. Nothing is kept over layers.
        """
        spec, engine, item = self.layout.spec, self.layout.engine, self.item
        tokens, tp = self.sizes.batched_tokens, engine.tp
        stream = 2 * tokens * spec.hidden_size
        if spec.latent:
            attention = tokens * (2 * spec.q_size + spec.kv_b_size + spec.attention_size) // tp
        else:
            attention = tokens * (2 * spec.q_size + 2 * spec.kv_size) // tp
        mlp = tokens * 3 * spec.ffn_hidden_size // tp
        experts = 0
        if spec.moe is not None:
            routed, width = self.routed_tokens(), spec.moe.ffn_hidden_size // engine.expert_tp
            sent = tokens * spec.moe.top_k // tp if engine.expert_parallel else 0
            experts = routed * (2 * spec.hidden_size + 3 * width) + sent * spec.hidden_size
            experts += tokens * 3 * spec.moe.shared_ffn_hidden_size // tp
        layers = (stream + max(attention, mlp, experts)) * item
        vocab = round_up(spec.vocab_size, self.layout.vocab_multiple)
        sampling = min(self.sizes.sequences, tokens) * vocab * _FP32 * _SAMPLING_COPIES
        return max(layers, stream * item + sampling)
