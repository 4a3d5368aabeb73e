"""vLLM-Ascend's C++ extension, which its wheel has for the real CANN alone.

Its operators are declared with the schemas of vLLM-Ascend 0.23.0 (``csrc/torch_binding.cpp``) and
computed by the references of :mod:`ascend.emulator.engine_operators`. Its memory pool is
``camem.c``. An operator that is not declared here is missing, which fails.
"""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

NAME = "vllm_ascend_C"
SCHEMAS = (
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, "
    "float epsilon=1e-6) -> (Tensor y, Tensor rstd, Tensor x)",
    "get_masked_input_and_mask(Tensor input, int org_vocab_start_index, int org_vocab_end_index, "
    "int num_org_vocab_padding, int added_vocab_start_index, int added_vocab_end_index) "
    "-> (Tensor masked_input, Tensor mask)",
    # of LoRA, declared because vLLM-Ascend adds shapes to them
    "bgmv_expand(Tensor! x, Tensor! weight, Tensor! indices, Tensor! y, int slice_offset, "
    "int slice_size) -> Tensor",
    "sgmv_expand(Tensor! x, Tensor! weight, Tensor! lora_indices, Tensor! seq_len, Tensor! y, "
    "int slice_offset, int slice_size) -> Tensor",
    "moe_gating_top_k(Tensor x, int k, int k_group, int group_count, int group_select_mode, "
    "int renorm, int norm_type, bool out_flag, float routed_scaling_factor, float eps, "
    "Tensor? bias_opt=None) -> (Tensor y, Tensor expert_idx, Tensor out)",
    "npu_moe_init_routing_custom(Tensor x, Tensor expert_idx, *, Tensor? scale=None, "
    "Tensor? offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1, "
    "int drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, "
    "int quant_mode=0, int[2] active_expert_range=[], int row_idx_type=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
Handle = tuple[int, int, int, int]
_KEPT: list[Any] = []  # what C and the dispatcher point to


def install() -> None:
    """Provide ``vllm_ascend.vllm_ascend_C`` and ``acl.rt``, before vLLM-Ascend is imported."""
    declare()
    pool = ctypes.CDLL(f"{NAME}.so")
    _KEPT.append(pool)
    module: Any = types.ModuleType(f"vllm_ascend.{NAME}")
    module.init_module = lambda allocated, freed: _init(pool, allocated, freed)
    module.python_create_and_map = _checked(pool.create_and_map)
    module.python_unmap_and_release = _checked(pool.unmap_and_release)
    sys.modules[module.__name__] = module
    runtime: Any = types.ModuleType("acl.rt")
    runtime.memcpy = _memcpy
    acl: Any = types.ModuleType("acl")
    acl.rt = runtime
    sys.modules.update({"acl": acl, "acl.rt": runtime})


def declare() -> None:
    """Declare the operators of the extension. Idempotent."""
    if not _KEPT:
        library = torch.library.Library("_C_ascend", "DEF")
        _KEPT.append(library)
        for schema in SCHEMAS:
            library.define(schema)


def _init(pool: ctypes.CDLL, allocated: Callable[[Handle], None], freed: Callable[[int], Handle]
          ) -> None:  # fmt: skip
    whole = ctypes.c_uint64
    on_malloc = ctypes.CFUNCTYPE(None, whole, whole, whole, whole)(
        lambda *handle: allocated(handle)
    )
    on_free = ctypes.CFUNCTYPE(whole, whole)(lambda address: freed(address)[3])
    pool.set_callbacks(on_malloc, on_free)
    _KEPT.extend((on_malloc, on_free))


def _checked(function: Any) -> Callable[..., None]:
    function.argtypes = [ctypes.c_uint64] * 4

    def call(*handle: int) -> None:
        if status := function(*handle):
            raise RuntimeError(f"{function.__name__} failed with status {status}")

    return call


def _memcpy(to: int, limit: int, source: int, size: int, kind: int) -> int:
    """As ``acl.rt.memcpy``; what is not mapped cannot be read or written."""
    ctypes.memmove(to, source, size)
    return 0
