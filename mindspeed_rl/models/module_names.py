"""Parameter names of the trainer under megatron-core's other module implementations.

The tables of the families name parameters after megatron-core's own modules. Transformer Engine's
modules, which MindSpeed replaces one by one on NPUs, keep a norm inside the linear layer that
follows it, and grouped GEMM keeps the experts of a rank in one module. Shapes and cuts stay equal.

Source: megatron-core 0.16.1, ``models/gpt/gpt_layer_specs.py`` and ``models/backends.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.models.spec import ModelSpec

_ATTENTION = "self_attention."
_LATENT_NORMS = {
    _ATTENTION + "q_layernorm.weight": _ATTENTION + "linear_q_up_proj.layer_norm_weight",
    _ATTENTION + "kv_layernorm.weight": _ATTENTION + "linear_kv_up_proj.layer_norm_weight",
}
_NORMS = {
    "grouped": {"input_layernorm.weight": _ATTENTION + "linear_qkv.layer_norm_weight"},
    "latent": _LATENT_NORMS,
}
_DENSE_NORM = {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
_ONE_EXPERT, _ALL_EXPERTS = "mlp.experts.local_experts.{e}.", "mlp.experts."


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The implementations of a trainer's modules.

    Attributes:
        fused_norms: Whether linear layers of Transformer Engine hold the norm before them.
        grouped_experts: Whether one module holds all experts of a rank, with one weight per expert.
    """

    fused_norms: bool = False
    grouped_experts: bool = False

    def __post_init__(self) -> None:
        assert self.fused_norms or not self.grouped_experts, "grouped GEMM comes with fused norms"

    def param(self, pattern: str, spec: ModelSpec, layer: int) -> str:
        """The name pattern that a row of the table has at a layer of the model."""
        prefix, separator, tail = pattern.partition("{l}.")
        if self.grouped_experts and tail.startswith(_ONE_EXPERT):
            return prefix + separator + _ALL_EXPERTS + tail.removeprefix(_ONE_EXPERT) + "{e}"
        if self.fused_norms:
            norms = _NORMS[spec.layer(layer).attention.kind]
            if not spec.has_experts(layer):
                norms = norms | _DENSE_NORM
            return prefix + separator + norms.get(tail, tail)
        return pattern


LOCAL = ModuleNames()
TRANSFORMER_ENGINE = ModuleNames(fused_norms=True)
GROUPED = ModuleNames(fused_norms=True, grouped_experts=True)
