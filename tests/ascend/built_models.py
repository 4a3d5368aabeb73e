"""Builds models with vLLM-Ascend's own classes on an emulated NPU: a process of its own.

usage: python -m ascend.built_models FOLDER ...

Prints the class of each model, and its parameters with their shapes and types, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

VERSION = "0.23.0"
ENVIRONMENT = {
    "VLLM_ASCEND_ENABLE_NZ": "0",
    "VLLM_VERSION": VERSION,
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "ascend",
    "MASTER_ADDR": "127.0.0.1",
}


def main() -> None:
    """The folders are checkpoints; those with experts come first."""
    os.environ.update(ENVIRONMENT)
    import torch
    import torch.distributed as dist
    from ascend.emulator import stand_ins
    from ascend.emulator.device import emulate

    emulate()
    stand_ins.install("acl", "triton", *stand_ins.VLLM_NEEDS)
    torch.npu.set_device(0)
    dist.init_process_group("cpu:gloo,npu:hccl", store=dist.HashStore(), rank=0, world_size=1)
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # its processes have no stand-ins
    found = {}
    for number, folder in enumerate(sys.argv[1:]):
        model = _build(folder, first=not number)
        params = {n: (tuple(p.shape), str(p.dtype)) for n, p in model.named_parameters()}
        found[folder] = {"class": type(model).__qualname__, "parameters": params}
    print("BUILT" + json.dumps(found), flush=True)
    os._exit(0)  # torch_npu's own exit handlers expect a device


def _build(folder: str, *, first: bool) -> Any:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(
        model=folder, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True,
        max_model_len=64, dtype="bfloat16",
        additional_config={"weight_nz_mode": 0, "enable_cpu_binding": False, "refresh": True},
    )  # fmt: skip
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        if first:
            _start(config)
        with torch.device("npu"):
            torch.set_default_dtype(torch.bfloat16)
            model = initialize_model(config)
            torch.set_default_dtype(torch.float32)
    return model


def _start(config: Any) -> None:
    """Groups, patches and operators, as the worker of vLLM-Ascend makes them."""
    from vllm.distributed import parallel_state
    from vllm_ascend.ascend_config import init_ascend_config
    from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel
    from vllm_ascend.utils import adapt_patch, register_ascend_customop

    parallel_state.init_distributed_environment(1, 0, "env://", 0, "hccl")
    parallel_state.initialize_model_parallel(1, 1)
    init_ascend_config(config)
    init_ascend_model_parallel(config.parallel_config)
    adapt_patch()
    register_ascend_customop(config)


if __name__ == "__main__":
    main()
