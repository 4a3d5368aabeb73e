"""Hugging Face configs of tiny models, one per family.

What a tiny model cannot scale down is fixed by vLLM's CPU kernels: heads of 32 channels or more,
experts of 32 channels on each rank, and latent attention with the real 512 + 64 cached channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class TinySizes:
    """Sizes of a tiny model. vLLM on CPU needs a head size of 32 or more.

    Attributes:
        vocab_size: number of tokens and rows of the embeddings. The default is odd, so tensor
            parallelism has to pad it.
        hidden_size: a multiple of ``num_heads``; the head size must be even.
        num_layers: number of decoder layers.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads; divides ``num_heads``.
        ffn: width of a dense MLP.
        max_position_embeddings: longest sequence, in tokens.
        num_experts: routed experts of a layer, in families with experts.
        expert_ffn: width of one of them.

    Raises:
        ValueError: the sizes contradict each other.
    """

    vocab_size: int = 307
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 2
    ffn: int = 128
    max_position_embeddings: int = 256
    num_experts: int = 4
    expert_ffn: int = 64

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} with num_heads={self.num_heads} gives no even "
                "head size; use a hidden_size that is an even multiple of num_heads"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; "
                "use a divisor"
            )


def _qwen2(**common: Any) -> PretrainedConfig:
    from transformers import Qwen2Config

    return Qwen2Config(**common, architectures=["Qwen2ForCausalLM"])


def _llama(**common: Any) -> PretrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(**common, architectures=["LlamaForCausalLM"])


def _qwen3(**common: Any) -> PretrainedConfig:
    from transformers import Qwen3Config

    return Qwen3Config(**common, architectures=["Qwen3ForCausalLM"])


def _qwen3_moe(num_experts: int, expert_ffn: int, **common: Any) -> PretrainedConfig:
    from transformers import Qwen3MoeConfig

    usual = {"num_experts_per_tok": 2, "norm_topk_prob": True}
    return Qwen3MoeConfig(
        **usual | common,
        num_experts=num_experts,
        moe_intermediate_size=expert_ffn,
        architectures=["Qwen3MoeForCausalLM"],
    )


def _deepseek_v3(num_experts: int, expert_ffn: int, **common: Any) -> PretrainedConfig:
    from transformers import DeepseekV3Config

    usual = {
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "num_nextn_predict_layers": 0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    fields = usual | common
    del fields["head_dim"]  # of the rotary part, there
    return DeepseekV3Config(
        **fields | {"num_key_value_heads": common["num_attention_heads"]},
        n_routed_experts=num_experts,
        moe_intermediate_size=expert_ffn,
        architectures=["DeepseekV3ForCausalLM"],
    )


_DENSE = {"qwen2": _qwen2, "llama": _llama, "qwen3": _qwen3}
_WITH_EXPERTS = {"qwen3_moe": _qwen3_moe, "deepseek_v3": _deepseek_v3}
TINY_FAMILIES: Mapping[str, Callable[..., PretrainedConfig]] = MappingProxyType(
    _DENSE | _WITH_EXPERTS
)


def tiny_config(family: str, sizes: TinySizes, **more: Any) -> PretrainedConfig:
    """The config of a family: untied embeddings, RoPE base 1e4.

    Raises:
        ValueError: an unknown family.
    """
    if family not in TINY_FAMILIES:
        raise ValueError(f"--family {family}: allowed are {', '.join(TINY_FAMILIES)}")
    common = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.hidden_size // sizes.num_heads,
        "max_position_embeddings": sizes.max_position_embeddings,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        **more,
    }
    if family in _WITH_EXPERTS:
        common |= {"num_experts": sizes.num_experts, "expert_ffn": sizes.expert_ffn}
    return TINY_FAMILIES[family](**common)
