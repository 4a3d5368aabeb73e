"""Kinds of attention and MLP with their dimensions, and the quantities that follow from them.

A model is a list of :class:`LayerSpec`. Each kind computes its own cached values, saved activations
and operations, so that callers sum over the layers of a model. Weight tables name their dimensions
and conditions by the attribute names of these classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.rope import RopeSpec


def check_positive(**sizes: int) -> None:
    """Refuse sizes of a model that are below 1.

    Raises:
        UsageError: A size is below 1; the message names the first one.
    """
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"model config: {name} is {size}, must be positive")


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Attention whose query heads share key/value heads in groups (arXiv:2305.13245).

    Attributes:
        num_heads: Number of query heads.
        num_kv_heads: Number of key heads, and of value heads; divides ``num_heads``.
        head_dim: Channels of a head.
        qkv_bias: Whether the projections of queries, keys and values have a bias.
        qk_norm: Whether query and key heads are normalised before the rotary embedding.
    """

    kind: ClassVar[str] = "grouped"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        check_positive(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"model config: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def attention_size(self) -> int:
        """Columns of the output projection."""
        return self.q_size

    @property
    def rope_dim(self) -> int:
        """Rotated channels of a query head."""
        return self.head_dim

    def softmax_scale(self, rope: RopeSpec) -> float:
        """Factor of attention scores before the softmax.

        All channels of queries and keys are rotated, so the factor of cosine and sine enters the
        scores squared.
        """
        return 1 / math.sqrt(self.head_dim) * rope.attention_factor**2

    @property
    def context_values(self) -> int:
        """Elements of a token's keys and values, which ranks that share its sequence exchange."""
        return 2 * self.kv_size

    def cached_values(self, tp: int) -> int:
        """Number of elements that an engine of ``tp`` ranks caches per token on each rank."""
        return 2 * max(1, self.num_kv_heads // tp) * self.head_dim

    @property
    def saved_values(self) -> int:
        """Elements per token that a backward pass needs: queries, keys, values and the output.

        Where heads are normalised, the queries and keys before their norms count as well.
        """
        normed = self.q_size + self.kv_size if self.qk_norm else 0
        return self.q_size + 2 * self.kv_size + normed + self.attention_size

    @property
    def engine_values(self) -> int:
        """Elements per token that an engine works with: queries, keys, values and the output."""
        return 2 * self.q_size + 2 * self.kv_size

    @property
    def pair_flops(self) -> int:
        """Operations for the score and the weighted value of one query token and one key token."""
        return 2 * self.num_heads * 2 * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        num_heads: Number of query heads; each has a key and a value of its own.
        q_lora_rank: Size of the compressed query; 0: queries are not compressed.
        kv_lora_rank: Size of the compressed key and value.
        nope_head_dim: Channels of a query and key head without rotary embedding.
        rope_head_dim: Channels of a query head, and of the shared key, with rotary embedding.
        v_head_dim: Channels of a value head.
    """

    kind: ClassVar[str] = "latent"
    qkv_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = True  # of the compressed query and key/value

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        check_positive(num_heads=self.num_heads, head_dim=self.head_dim)

    @property
    def num_kv_heads(self) -> int:
        """Number of key heads (and of value heads) once they are expanded."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Channels of a query and key head."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def q_size(self) -> int:
        """Rows of the (up) projection of queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_a_size(self) -> int:
        """Rows of the joint down projection of latent key/value and rotary key."""
        return self.kv_lora_rank + self.rope_head_dim

    @property
    def kv_b_size(self) -> int:
        """Rows of the up projection of latent key/value."""
        return self.num_heads * (self.nope_head_dim + self.v_head_dim)

    @property
    def attention_size(self) -> int:
        """Columns of the output projection."""
        return self.num_heads * self.v_head_dim

    @property
    def compressed_query(self) -> bool:
        return self.q_lora_rank > 0

    @property
    def plain_query(self) -> bool:
        """Whether queries have one full projection instead of a compressed form."""
        return self.q_lora_rank == 0

    @property
    def rope_dim(self) -> int:
        """Rotated channels of a query head."""
        return self.rope_head_dim

    def softmax_scale(self, rope: RopeSpec) -> float:
        """Factor of attention scores before the softmax."""
        return 1 / math.sqrt(self.head_dim) * rope.softmax_mscale**2

    @property
    def context_values(self) -> int:
        """Elements of a token's expanded keys and values, which ranks of its sequence exchange."""
        return self.q_size + self.attention_size

    def cached_values(self, tp: int) -> int:
        """Elements cached per token on each rank: all of compressed key/value and rotary key."""
        return self.kv_a_size

    @property
    def saved_values(self) -> int:
        """Elements per token that a backward pass needs.

        These are queries, keys, values, the output, and the compressed query and key/value.
        """
        heads = 2 * self.q_size + 2 * self.attention_size
        return heads + self.q_lora_rank + self.kv_a_size

    @property
    def engine_values(self) -> int:
        """Elements per token that an engine works with when it expands the keys of a prompt."""
        return 2 * self.q_size + self.kv_b_size + self.attention_size

    @property
    def pair_flops(self) -> int:
        """Operations for the score and the weighted value of one query token and one key token."""
        return 2 * self.num_heads * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class DenseMLP:
    """A gated MLP with ``ffn_hidden_size`` channels between its two projections.

    Attributes:
        recompute_module: Name of the MLP in ``--recompute-modules``.
        top_k: Number of experts that a token is routed to.
        copy_values: Elements of a routed copy of a token.
        routing_values: Elements per token, in fp32, that a backward pass needs for the routing.
        active_share: Share of the weights of experts that a token is multiplied with.
    """

    kind: ClassVar[str] = "dense"
    recompute_module: ClassVar[str] = "mlp"
    top_k: ClassVar[int] = 0
    copy_values: ClassVar[int] = 0
    routing_values: ClassVar[int] = 0
    active_share: ClassVar[Fraction] = Fraction(1)

    ffn_hidden_size: int

    def __post_init__(self) -> None:
        check_positive(ffn_hidden_size=self.ffn_hidden_size)

    @property
    def saved_values(self) -> int:
        """Elements per token that a backward pass needs: gate, up and their activated product."""
        return 3 * self.ffn_hidden_size

    @property
    def engine_values(self) -> int:
        """Elements per token that an engine works with: gate, up and their activated product."""
        return 3 * self.ffn_hidden_size


@dataclass(frozen=True, slots=True)
class MoE:
    """A mixture of experts.

    Attributes:
        recompute_module: Name of the MLP in ``--recompute-modules``.
        num_experts: Number of routed experts of the layer.
        top_k: Number of experts that a token is routed to.
        expert_ffn_size: Intermediate size of one routed expert.
        shared_ffn_size: Intermediate size of all shared experts together; 0: there are none.
        score_function: ``"softmax"`` or ``"sigmoid"``.
        normalize_top_k: Whether the weights of the chosen experts are scaled to sum to 1.
        router_bias: Whether a bias per expert takes part in the choice, but not in the weights.
        num_groups: Number of groups of experts; experts are chosen from the best ``top_k_groups``
            groups; 1: from all experts.
        top_k_groups: Number of groups that experts are chosen from.
        scaling_factor: Factor of the outputs of routed experts.
    """

    kind: ClassVar[str] = "moe"
    recompute_module: ClassVar[str] = "moe"

    num_experts: int
    top_k: int
    expert_ffn_size: int
    shared_ffn_size: int = 0
    score_function: str = "softmax"
    normalize_top_k: bool = True
    router_bias: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.num_experts:
            raise UsageError(
                f"model config: num_experts_per_tok {self.top_k} is not between 1 and the "
                f"{self.num_experts} experts"
            )
        if not 0 < self.top_k_groups <= self.num_groups:
            raise UsageError(
                f"model config: topk_group {self.top_k_groups} is not between 1 and the "
                f"{self.num_groups} groups of n_group"
            )
        if self.num_experts % self.num_groups:
            raise UsageError(
                f"model config: n_group {self.num_groups} does not divide the "
                f"{self.num_experts} experts"
            )

    @property
    def saved_values(self) -> int:
        """Elements per token that a backward pass needs of the shared experts."""
        return 3 * self.shared_ffn_size

    @property
    def engine_values(self) -> int:
        """Elements per token that an engine works with in the shared experts."""
        return 3 * self.shared_ffn_size

    @property
    def copy_values(self) -> int:
        """Elements of a routed copy of a token: gate, up and their product, without its input."""
        return 3 * self.expert_ffn_size

    @property
    def routing_values(self) -> int:
        """Elements per token, in fp32, that a backward pass needs for the routing."""
        return 2 * self.num_experts

    @property
    def active_share(self) -> Fraction:
        """Share of the weights of experts that a token is multiplied with."""
        return Fraction(self.top_k, self.num_experts)


Attention = GroupedQueryAttention | LatentAttention
MLP = DenseMLP | MoE


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: its attention and its MLP, each of some kind. Equal layers may be one object."""

    attention: Attention
    mlp: MLP

    @property
    def latent_attention(self) -> bool:
        return isinstance(self.attention, LatentAttention)

    @property
    def moe(self) -> MoE | None:
        """The experts of the layer; ``None`` where the MLP is dense."""
        return self.mlp if isinstance(self.mlp, MoE) else None
