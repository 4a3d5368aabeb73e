"""What megatron-core 0.16.1 takes from ``transformer_engine.pytorch`` while it is imported."""

import sys
from types import ModuleType

from transformer_engine.pytorch.modules import MADE as MADE
from transformer_engine.pytorch.modules import DotProductAttention as DotProductAttention
from transformer_engine.pytorch.modules import GroupedLinear as GroupedLinear
from transformer_engine.pytorch.modules import LayerNormLinear as LayerNormLinear
from transformer_engine.pytorch.modules import Linear as Linear
from transformer_engine.pytorch.modules import RMSNorm as RMSNorm

# Imported by megatron-core, or the base of a class of its; used on CUDA, in FP8 or by the fuser
# alone, so that a call fails.
_NEVER_USED = {
    "distributed": ("CudaRNGStatesTracker", "activation_recompute_forward"),
    "ops": ("FusibleOperation", "Sequential"),
    "router": (
        *("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss"),
        "fused_moe_aux_loss",
    ),
    "tensor": ("QuantizedTensor",),
}
for _name, _members in _NEVER_USED.items():
    _module = ModuleType(f"{__name__}.{_name}")
    vars(_module).update({member: type(member, (), {}) for member in _members})
    sys.modules[_module.__name__] = globals()[_name] = _module
