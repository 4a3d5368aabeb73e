"""Predicts the bytes of the rollout engine on one rank: weights, key/value cache, workspace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mindspeed_rl.core.layout import round_up
from mindspeed_rl.models.layers import MLP, LatentAttention
from mindspeed_rl.rollout.draft_model import DraftModel, cached_values
from mindspeed_rl.rollout.provider import EngineSizes
from mindspeed_rl.weight_layouts.rollout import RolloutLayout

_FP32 = 4
# Matrices [sequences, vocabulary] in fp32 during sampling: logits, probabilities, noise.
_SAMPLING_COPIES = 3


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The predicted memory of an engine with one layout.

    Attributes:
        layout: Spec and rollout layout.
        item: Bytes of an element of weights and cache.
        sizes: Sizes that the kind of engine and its options decide.
        kv_cache_bytes: Bytes of cache that the flag asks for on each rank.
        imbalance: Tokens of the busiest expert-parallel rank as a multiple of the mean.
        rows: Most rows of a sequence in a decode step: its next token, and one for each drafted.
        draft: The model that drafts, if there is one.
    """

    layout: RolloutLayout
    item: int
    sizes: EngineSizes
    kv_cache_bytes: int
    imbalance: float = 1.0
    rows: int = 1
    draft: DraftModel | None = None

    def weights(self, rank: int) -> int:
        """Return the bytes of a rank's parameters, padded, and copies that the engine derives."""
        return self.parameters(rank) + self._latent_copies()

    def parameters(self, rank: int) -> int:
        """Return the bytes of a rank's parameters, padded."""
        return _parameter_bytes(self.layout, rank, self.item)

    def _latent_copies(self) -> int:
        if not self.sizes.copies_latent:
            return 0
        attentions = (layer.attention for layer in self.layout.spec.layers)
        latent = (x for x in attentions if isinstance(x, LatentAttention))
        copied = sum(x.kv_b_size * x.kv_lora_rank for x in latent)
        return copied // self.layout.engine.tp * self.item

    def draft_model(self) -> int:
        """Return the bytes of the model that drafts on a rank, with the buffers of its steps."""
        if self.draft is None:
            return 0
        buffers = self.draft.buffered_values(self.sizes.batched_tokens)
        return (self.draft.elements(self.layout.engine.tp) + buffers) * self.item

    def token_bytes(self) -> int:
        """Return the cache bytes of one token in all layers on a rank, those of drafts too."""
        return cached_values(self.layout.spec, self.draft, self.layout.engine.tp) * self.item

    def kv_cache(self) -> int:
        """Return the bytes of the cache in whole blocks of all layers, as engines allocate it."""
        block = self.token_bytes() * self.sizes.block_tokens
        return self.kv_cache_bytes // block * block

    def routed_tokens(self, mlp: MLP) -> int:
        """Return the copies of tokens that the busiest rank computes in one layer of experts."""
        engine = self.layout.engine
        copies = self.sizes.batched_tokens * engine.dp * mlp.top_k
        if not engine.expert_parallel:
            return copies  # every rank has a slice of every expert
        return int(copies / engine.size * self.imbalance)

    def workspace(self) -> int:
        """Return the bytes at the fullest moment of an engine step with the most tokens.

        These are residual stream and normed input, and the larger of attention (projections of
        queries, keys and values, output) and MLP (gate, up, activated). Experts add their input and
        output ([routed, hidden] each), both halves and the activated product, and the copies that
        the rank sends. Sampling has logits of all sequences in fp32, those of drafts
        as well. No layer keeps activations.
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
        sampling = min(self.sizes.sequences * self.rows, tokens) * vocab * _FP32 * _SAMPLING_COPIES
        return max(layers, stream * item + sampling)

    def _mlp_values(self, mlp: MLP) -> int:
        """Return the elements of the working memory of one MLP."""
        engine, tokens = self.layout.engine, self.sizes.batched_tokens
        hidden, of_copy = self.layout.spec.hidden_size, mlp.copy_values // engine.expert_tp
        sent = tokens * mlp.top_k // engine.tp if engine.expert_parallel else 0
        experts = self.routed_tokens(mlp) * (2 * hidden + of_copy) + sent * hidden
        return experts + tokens * mlp.engine_values // engine.tp


@lru_cache(maxsize=128)
def _parameter_bytes(layout: RolloutLayout, rank: int, item: int) -> int:
    """Return the bytes of a rank's parameters; cached, because every tried change asks again."""
    return sum(layout.local_bytes(rank, item).values())
