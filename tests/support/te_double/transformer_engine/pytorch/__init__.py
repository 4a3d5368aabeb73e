"""What megatron-core 0.16.1 takes from ``transformer_engine.pytorch`` while it is imported."""

from transformer_engine.pytorch import distributed as distributed
from transformer_engine.pytorch import ops as ops
from transformer_engine.pytorch.modules import MADE as MADE
from transformer_engine.pytorch.modules import DotProductAttention as DotProductAttention
from transformer_engine.pytorch.modules import GroupedLinear as GroupedLinear
from transformer_engine.pytorch.modules import LayerNormLinear as LayerNormLinear
from transformer_engine.pytorch.modules import Linear as Linear
from transformer_engine.pytorch.modules import RMSNorm as RMSNorm
