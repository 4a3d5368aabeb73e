"""Bytes of the rollout engine on one rank: weights, key/value cache, work space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_rl.models.layers import MLP, Attention, DenseMLP, LatentAttention, MoE
from mindspeed_rl.models.rules import round_up
from mindspeed_rl.weights.layouts.vllm import VllmLayout

_FP32 = 4
# vLLM's defaults where no option says otherwise.
DEFAULT_BATCHED_TOKENS = 8192
DEFAULT_SEQUENCES = 256
_BLOCK_TOKENS = 128
# [sequences, vocabulary] in fp32 while tokens are sampled: logits, probabilities, noise.
_SAMPLING_COPIES = 3


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The engine of one layout.

    Attributes:
        layout: spec and rollout layout.
        item: bytes of an element of weights and cache.
        options: further arguments of ``vllm.LLM``.
        kv_cache_bytes: what is asked for on each rank.
        imbalance: tokens that the busiest rank of the experts gets, by the mean.
        latent_block_tokens: tokens of a block of latent attention's cache where no option says
            otherwise; other models have 128 everywhere.
        copies_latent: the engine keeps both halves of latent attention's up projection once more,
            transposed, as vLLM-Ascend does; vLLM's own are views of it.
    """

    layout: VllmLayout
    item: int
    options: Mapping[str, object]
    kv_cache_bytes: int
    imbalance: float = 1.0
    copies_latent: bool = False
    latent_block_tokens: int = 16

    @property
    def batched_tokens(self) -> int:
        """Tokens of one engine step of a data-parallel rank."""
        return _number(self.options.get("max_num_batched_tokens"), DEFAULT_BATCHED_TOKENS)

    @property
    def sequences(self) -> int:
        """Sequences of one engine step."""
        return _number(self.options.get("max_num_seqs"), DEFAULT_SEQUENCES)

    def weights(self, rank: int) -> int:
        """Parameters of a rank, padding included, and copies that the engine derives from them."""
        return sum(self.layout.local_bytes(rank, self.item).values()) + self._latent_copies()

    def _latent_copies(self) -> int:
        if not self.copies_latent:
            return 0
        latent = (
            [x for x in attentions if isinstance(x, LatentAttention)]
            for attentions in self._attentions_of_stages()
        )
        most = max(sum(x.kv_b_size * x.kv_lora_rank for x in stage) for stage in latent)
        return most // self.layout.engine.tp * self.item

    def _attentions_of_stages(self) -> list[list[Attention]]:
        """The attention of every layer of every pipeline stage."""
        spec, engine = self.layout.spec, self.layout.engine
        stages = (engine.layers_of(stage, spec.num_layers) for stage in range(engine.pp))
        return [[spec.layers[n].attention for n in layers] for layers in stages]

    def token_bytes(self) -> int:
        """Cache of one token on a rank of the fullest pipeline stage, all its layers."""
        tp, stages = self.layout.engine.tp, self._attentions_of_stages()
        return max(sum(x.cached_values(tp) for x in stage) for stage in stages) * self.item

    def kv_cache(self) -> int:
        """What is asked for in whole blocks of all layers, as vLLM allocates it."""
        kinds = {layer.attention.kind for layer in self.layout.spec.layers}
        default = self.latent_block_tokens if "latent" in kinds else _BLOCK_TOKENS
        block = self.token_bytes() * _number(self.options.get("block_size"), default)
        return self.kv_cache_bytes // block * block

    def routed_tokens(self, moe: MoE) -> int:
        """Copies of tokens that the busiest rank computes in one layer with these experts."""
        engine = self.layout.engine
        copies = self.batched_tokens * engine.dp * moe.top_k
        if not engine.expert_parallel:
            return copies  # every rank has a slice of every expert
        return int(copies / engine.expert_ranks * self.imbalance)

    def workspace(self) -> int:
        """The largest moment of an engine step of ``max_num_batched_tokens`` tokens.

        Residual stream and normed input, and the larger of attention (projections of queries, keys
        and values, output) and MLP (gate, up, activated). Experts add what they take and give back
        ([routed, hidden] each), both halves and the activated product, and the copies that the
        rank sends. Sampling holds logits of all sequences in fp32. Nothing is kept over layers.
        """
        spec, tp, item = self.layout.spec, self.layout.engine.tp, self.item
        tokens = self.batched_tokens
        stream = 2 * tokens * spec.hidden_size
        widest = max(
            max(tokens * layer.attention.engine_values // tp, self._mlp_values(layer.mlp))
            for layer in dict.fromkeys(spec.layers)
        )
        layers = (stream + widest) * item
        vocab = round_up(spec.vocab_size, self.layout.vocab_multiple)
        sampling = min(self.sequences, tokens) * vocab * _FP32 * _SAMPLING_COPIES
        return max(layers, stream * item + sampling)

    def _mlp_values(self, mlp: MLP) -> int:
        """Elements that one MLP works with."""
        engine, tokens = self.layout.engine, self.batched_tokens
        if isinstance(mlp, DenseMLP):
            return tokens * 3 * mlp.ffn_hidden_size // engine.tp
        hidden, width = self.layout.spec.hidden_size, mlp.expert_ffn_size // engine.expert_tp
        sent = tokens * mlp.top_k // engine.tp if engine.expert_parallel else 0
        experts = self.routed_tokens(mlp) * (2 * hidden + 3 * width) + sent * hidden
        return experts + tokens * 3 * mlp.shared_ffn_size // engine.tp


def _number(value: object, default: int) -> int:
    return int(value) if isinstance(value, int | float) else default
