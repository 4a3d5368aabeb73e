"""A double of Transformer Engine 2.11 on a CPU, so that megatron-core's real wrappers can be built.

Its modules take the arguments of the real ones and no others, name, shape and mark their parameters
as they do, and compute the same in plain torch. Written after NVIDIA/TransformerEngine, tag v2.11,
``transformer_engine/pytorch/module``. FP8, userbuffers and fused kernels are not there.
"""

__version__ = "2.11.0"

from transformer_engine import common as common
from transformer_engine import pytorch as pytorch
