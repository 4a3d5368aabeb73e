"""Low-rank adapters: the flags, which weights have one, and the scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mindspeed_rl.core.flag import Needs, flag

RANK_FLAG = "--lora-rank"
#: Linear layers that may have an adapter, by the names that Hugging Face models give them.
LINEAR_LAYERS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)
ALL_LINEAR = "all-linear"
#: Names of megatron-core's layers, which MindSpeed-LLM takes, and the layers that they are. With
#: latent attention linear_qkv is the joint down projection of MindSpeed-LLM.
FUSED_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "linear_qb": ("q_b_proj",),
    "linear_kvb": ("kv_b_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    ALL_LINEAR: LINEAR_LAYERS,
}
_WITH_ADAPTERS = Needs(RANK_FLAG)
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Low-rank adapters (LoRA).

    Every chosen weight W is replaced by W + s B A, with A of --lora-rank rows and B of as many
    columns. Only A and B are trained, saved and have gradients and optimizer states; the weights of
    --hf-checkpoint stay as they are. The engine and the exported model have the sum.

    --lora-rank 32 --lora-alpha 64 --lr 1e-5
    """

    lora_rank: int = flag(
        0,
        "Rank of the adapters; 0: all weights are trained.",
        minimum=0,
        names=(RANK_FLAG, "--lora-r"),
    )
    lora_alpha: float = flag(
        32.0,
        "Numerator of the scale s of the adapters: s is alpha / rank.",
        above=0.0,
        needs=_WITH_ADAPTERS,
    )
    lora_target: tuple[str, ...] = flag(
        (ALL_LINEAR,),
        "Linear layers with an adapter, in every layer and in every expert. all-linear: all of "
        "those that can have one. q_a_proj, q_b_proj, kv_a_proj_with_mqa and kv_b_proj are in "
        "models with latent attention. Names that begin with linear_ are the same layers by the "
        "names of megatron-core and MindSpeed-LLM.",
        choices=(*LINEAR_LAYERS, *FUSED_LAYERS),
        nargs="+",
        names=("--lora-target", "--lora-target-modules"),
        needs=_WITH_ADAPTERS,
    )
    lora_rslora: bool = flag(
        False,
        "Rank-stabilised LoRA: the scale s is alpha / sqrt(rank) (Kalajdzievski 2023, "
        "arXiv:2312.03732).",
        needs=_WITH_ADAPTERS,
    )

    @property
    def is_on(self) -> bool:
        """Whether the policy has adapters."""
        return self.lora_rank > 0

    @property
    def scale(self) -> float:
        """The factor s of B A (Hu et al. 2021, arXiv:2106.09685)."""
        below = math.sqrt(self.lora_rank) if self.lora_rslora else self.lora_rank
        return self.lora_alpha / below

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the linear layers with an adapter, each once, in a fixed order."""
        chosen = {n for name in self.lora_target for n in FUSED_LAYERS.get(name, (name,))}
        return tuple(name for name in LINEAR_LAYERS if name in chosen)

    def covers(self, hf_name: str) -> bool:
        """Whether the HF tensor of this name is a weight with an adapter."""
        return linear_layer(hf_name) in self.layers

    def layers_among(self, hf_names: Iterable[str]) -> tuple[str, ...]:
        """Return the linear layers with an adapter that a model with these HF tensors has."""
        held = {linear_layer(name) for name in hf_names}
        return tuple(name for name in self.layers if name in held)


def linear_layer(hf_name: str) -> str:
    """Return the name of the linear layer that an HF tensor is the weight of, or an empty one."""
    module, dot, kind = hf_name.rpartition(".")
    name = module.rpartition(".")[2]
    return name if dot + kind == _WEIGHT and name in LINEAR_LAYERS else ""


#: All weights are trained.
NO_ADAPTERS = LoraSettings()
