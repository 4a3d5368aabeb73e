"""Parameter names of the trainer under megatron-core's other module implementations.

The tables of the families name parameters after megatron-core's own modules. Transformer Engine's
modules, which MindSpeed replaces one by one on NPUs, keep a norm inside the linear layer that
follows it, and grouped GEMM keeps the experts of a rank in one module. Shapes and cuts stay.

Source: megatron-core 0.16.1, ``models/gpt/gpt_layer_specs.py`` and ``models/backends.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from mindspeed_rl.models.expert_rules import PerExpert
from mindspeed_rl.models.rules import Row
from mindspeed_rl.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Which implementations the modules of a trainer have.

    Attributes:
        fused_norms: linear layers of Transformer Engine hold the norm before them.
        grouped_experts: one module holds all experts of a rank, one weight each.
    """

    fused_norms: bool = False
    grouped_experts: bool = False

    def __post_init__(self) -> None:
        assert self.fused_norms or not self.grouped_experts, "grouped GEMM comes with fused norms"


LOCAL = ModuleNames()
TRANSFORMER_ENGINE = ModuleNames(fused_norms=True)
GROUPED = ModuleNames(fused_norms=True, grouped_experts=True)

_ATTENTION = "self_attention."
_LATENT_NORMS = {
    _ATTENTION + "q_layernorm.weight": _ATTENTION + "linear_q_up_proj.layer_norm_weight",
    _ATTENTION + "kv_layernorm.weight": _ATTENTION + "linear_kv_up_proj.layer_norm_weight",
}
_GROUPED_NORMS = {"input_layernorm.weight": _ATTENTION + "linear_qkv.layer_norm_weight"}
_BEFORE_MLP, _IN_MLP = "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"


def named_rows(rows: Iterable[Row], spec: ModelSpec, modules: ModuleNames) -> tuple[Row, ...]:
    """The rows with the names of these modules; the same objects at every call. Pure."""
    if modules == LOCAL:
        return tuple(rows)
    latent, experts = spec.latent is not None, spec.moe is not None
    return tuple(new for row in rows for new in _named(row, modules, latent, experts))


@cache
def _named(row: Row, modules: ModuleNames, latent: bool, experts: bool) -> tuple[Row, ...]:
    """One row; the norm before the MLP becomes two where layers of both kinds may exist."""
    if isinstance(row, PerExpert):
        return (_named_expert(row, modules),)
    prefix, separator, tail = row.param.partition("{l}.")
    if tail == _BEFORE_MLP:
        dense = replace(row, param=prefix + separator + _IN_MLP, stage="dense")
        return (dense, replace(row, stage="moe")) if experts else (dense,)
    name = (_LATENT_NORMS if latent else _GROUPED_NORMS).get(tail)
    return (replace(row, param=prefix + separator + name) if name else row,)


def _named_expert(row: PerExpert, modules: ModuleNames) -> PerExpert:
    if not modules.grouped_experts:
        return row
    name = row.param.replace("experts.local_experts.{e}.", "experts.") + "{e}"
    return replace(row, param=name)
