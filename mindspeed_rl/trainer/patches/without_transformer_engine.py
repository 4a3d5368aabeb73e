"""Defines names that megatron-core only defines if Transformer Engine is installed.

Why: ``moe_utils`` reads ``te_general_gemm`` in every router call and never defines it without
Transformer Engine (NameError). ``multi_latent_attention`` accepts only linear classes that it knows
for the down projections, and its ``TELinear`` is no class then (isinstance raises), so the
replicated layer of this project takes its place. It does so, too, if Transformer Engine (or
MindSpeed instead of it) is installed and local modules are configured.
Upstream: megatron/core/transformer/moe/moe_utils.py, megatron/core/transformer/
multi_latent_attention.py.
Versions: megatron-core 0.16.1.
Remove when: both modules define fallbacks.
"""

from __future__ import annotations

from mindspeed_rl.trainer.latent_attention import DuplicatedLinear


def apply() -> None:
    """Define the names that local modules need. Idempotent.

    Raises:
        RuntimeError: The modules lack names that this patch expects.
    """
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    for module, name in ((moe_utils, "HAVE_TE"), (multi_latent_attention, "TELinear")):
        if not hasattr(module, name):
            raise RuntimeError(
                f"patch without_transformer_engine: {module.__name__}.{name} is gone; written for "
                "megatron-core 0.16.1. Install that version or update the patch"
            )
    if not moe_utils.HAVE_TE and not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    multi_latent_attention.TELinear = DuplicatedLinear
