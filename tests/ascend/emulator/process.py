"""Steps that make a process one with emulated NPUs, each at its place in the order of an entry."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import SimpleNamespace


def before_group() -> None:
    """Switch the emulation on; imports torch, so the environment is prepared before."""
    from ascend.emulator import stand_ins
    from ascend.emulator.device import emulate

    if importlib.util.find_spec("mindspeed"):
        stand_ins.install("acl", "triton")  # of CANN and of triton-ascend
    emulate()


def after_adaptor() -> None:
    """References in place of the operators that MindSpeed compiles with CANN's compiler."""
    from ascend.emulator.operators import rotate, update_adamw

    for name, builder, reference in (
        ("npu_rotary_position_embedding", "rope_op_builder", rotate),
        ("npu_apply_fused_adamw_v2", "op_builder", update_adamw),
    ):
        if module := sys.modules.get(f"mindspeed.ops.{name}"):
            operators = SimpleNamespace(**{name: reference})
            getattr(module, builder).load = lambda operators=operators: operators


def before_vllm() -> None:
    """Stand-ins of what vLLM and vLLM-Ascend import and this machine lacks; imports neither."""
    from ascend.emulator import extension, stand_ins

    extension.install()
    stand_ins.install("triton", *stand_ins.VLLM_NEEDS)
    os.environ["VLLM_PLUGINS"] = "ascend"


def before_engine() -> None:
    """References in place of parts of vLLM, which is imported."""
    from ascend.emulator.engine_operators import SlotMapping
    from vllm.model_executor.models import registry
    from vllm.v1.worker import block_table

    registry._run_in_subprocess = lambda function: function()  # its processes have no stand-ins
    block_table._compute_slot_mapping_kernel = SlotMapping()
