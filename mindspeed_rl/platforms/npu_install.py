"""Makes megatron-core usable on an NPU, and undoes changes to torch that break other libraries.

MindSpeed's adaptor, if installed, is imported with a clean command line, because it reads
``sys.argv`` and takes flags of any program for its own; its features are set through its
``repatch`` alone, once, before the first process group of megatron-core exists. Without MindSpeed,
torch_npu's ``transfer_to_npu`` replaces CUDA and megatron-core's own modules run.

Both change what vLLM and transformers in the same process see. These changes are undone:

- ``torch.compile`` and ``torch.jit.script``, which the adaptor replaces by functions that do
  nothing. megatron-core keeps the replacement, because its fused functions are bound before;
- placeholder modules of the adaptor. ``find_spec("flash_attn")`` finds them, and vLLM then fails to
  import names from them;
- ``is_active`` of each Triton driver, which would take the replaced CUDA for a real one.

These changes stay: ``torch.cuda``, ``torch.distributed.all_reduce`` (its tensor must be positional,
and float64 is reduced as float32), ``torch.Tensor.view`` (copies a tensor that is not contiguous)
and ``torch.Tensor.type``. tests/unit/platforms/test_npu_calls.py checks our calls against them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed_rl.config.npu import NpuSetup
from mindspeed_rl.core.installed import has_mindspeed
from mindspeed_rl.core.patching import Patch, apply_patch

# Placeholders of the adaptor that vLLM or transformers look for; megatron-core needs the others.
PURGED = ("flash_attn", "fla", "fast_hadamard_transform")
# Packages that import their attributes on access.
LAZY = ("transformers",)
# torch_npu imports these modules to patch their use of CUDA, and with them data sets and trackers,
# which takes seconds at every start. Nothing here trains with them.
FOREIGN_TRAINERS = (
    "transformers.trainer", "transformers.training_args", "transformers.trainer_utils",
)  # fmt: skip
_DUMMY_FILE = "mindspeed.dummy_module.py"
_INSTALLED: list[NpuSetup] = []  # the first set-up of this process, which stays


def install(setup: NpuSetup) -> None:
    """Set this process up for megatron-core on an NPU; a second call does nothing. Local.

    Raises:
        RuntimeError: megatron-core was imported before MindSpeed could be applied.
    """
    if _INSTALLED:
        return
    with_mindspeed = has_mindspeed()
    loaded = [name for name in sys.modules if name.split(".")[:2] == ["megatron", "core"]]
    if with_mindspeed and loaded:
        raise RuntimeError(f"MindSpeed must be applied before {loaded[0]} is imported")
    with _kept_functions(), _kept_triton_drivers(), _hidden(FOREIGN_TRAINERS):
        if with_mindspeed:
            _apply_adaptor(setup.features)
        else:
            _answer_for_cuda()
        importlib.import_module("megatron.core.jit")
    _purge_dummies()
    if setup.group_buffers_mb:
        apply_patch(_group_buffers(setup.group_buffers_mb))
    if setup.deterministic:  # MindSpeed's own switch acts on megatron.training alone
        assert os.environ.get("HCCL_DETERMINISTIC") == "strict", "prepare_environment sets it"
        torch.use_deterministic_algorithms(True)
    _INSTALLED.append(setup)


def determinism_line() -> str:
    """Describe the determinism that is in force now, for the log at the start of a run.

    vLLM-Ascend's batch-invariant mode turns errors of torch into warnings when an engine is built.
    """
    names = ("HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC", "CLOSE_MATMUL_K_SHIFT")
    found = [f"{name}={os.environ.get(name, 'unset')}" for name in (*names, "VLLM_BATCH_INVARIANT")]
    kernels = "allowed"
    if torch.are_deterministic_algorithms_enabled():
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        kernels = "warned of" if warns else "refused"
    return f"determinism: kernels that vary are {kernels}; {', '.join(found)}"


def _apply_adaptor(features: Mapping[str, Any]) -> None:
    patcher: Any = importlib.import_module("mindspeed.patch_utils")
    patcher.sys = types.SimpleNamespace(modules=_SeenModules())
    with _clean_argv():
        adaptor: Any = importlib.import_module("mindspeed.megatron_adaptor")
        adaptor.repatch(dict(features))
    _check_applied()


def _check_applied() -> None:
    """Check that MindSpeed's patches are in force.

    Raises:
        RuntimeError: A class of megatron-core is not patched, so that later errors would mislead.
    """
    config: Any = importlib.import_module("megatron.core.transformer.transformer_config")
    if not config.TransformerConfig.__init__.__globals__["__name__"].startswith("mindspeed."):
        megatron, mindspeed = sys.modules["megatron.core"], sys.modules["mindspeed"]
        raise RuntimeError(
            f"MindSpeed ({mindspeed.__path__}) was imported, but its patches of megatron-core "
            f"({megatron.__path__}) are not in force; install the branches of the matrix"
        )


class _SeenModules:
    """``sys.modules`` as MindSpeed sees it, without packages that import attributes on access.

    To place a patch MindSpeed asks every module for an attribute, again for every patch, and
    transformers then imports its models: that takes a minute, and fails where an optional package
    is missing.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules, name)

    def __getitem__(self, name: str) -> types.ModuleType:
        return sys.modules[name]

    def __setitem__(self, name: str, module: types.ModuleType) -> None:
        sys.modules[name] = module

    def __contains__(self, name: str) -> bool:
        return name in sys.modules

    def copy(self) -> dict[str, types.ModuleType]:
        """Return the modules in which MindSpeed looks for attributes."""
        return {n: m for n, m in sys.modules.items() if n.split(".")[0] not in LAZY}


def _answer_for_cuda() -> None:
    """Apply torch_npu's replacement of CUDA, and do not compile megatron-core's functions.

    Tensors then say that they are of CUDA, and torch's broadcast compares the device's capability,
    for which torch_npu has ``None``. It becomes that of an A100; without it no checkpoint is saved.
    """
    importlib.import_module("torch_npu.contrib.transfer_to_npu")
    replaced: Any = torch
    replaced.compile = replaced.jit.script = _uncompiled
    replaced.cuda.get_device_capability = lambda device=None: (8, 0)
    real_type = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(answer, str) and caller.startswith("megatron.core"):
            return answer.replace(".npu.", ".cuda.")  # megatron-core compares names of types
        return answer

    replaced.Tensor.type = type_


def _uncompiled(model: Any = None, **options: Any) -> Any:
    return model if model is not None else lambda function: function


@contextmanager
def _clean_argv() -> Iterator[None]:
    """Hide the command line from MindSpeed: ``--help`` would exit, ``--lr`` become a feature."""
    given = sys.argv
    sys.argv = given[:1]
    try:
        yield
    finally:
        sys.argv = given


@contextmanager
def _kept_functions() -> Iterator[None]:
    compile_, script = torch.compile, torch.jit.script
    yield
    changed: Any = torch
    changed.compile, changed.jit.script = compile_, script


@contextmanager
def _hidden(names: Sequence[str]) -> Iterator[None]:
    """Make those of the modules that are not loaded yet fail to import within the block."""
    hidden = [name for name in names if name not in sys.modules]
    unavailable: Any = None
    sys.modules.update(dict.fromkeys(hidden, unavailable))
    try:
        yield
    finally:
        for name in hidden:
            if name in sys.modules and sys.modules[name] is None:
                del sys.modules[name]


@contextmanager
def _kept_triton_drivers() -> Iterator[None]:
    """Keep which Triton drivers are active: vLLM uses Triton only if exactly one is."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    backends = importlib.import_module("triton.backends").backends
    drivers = [backend.driver for backend in backends.values() if backend.driver]
    before = [bool(driver.is_active()) for driver in drivers]
    yield
    for driver, active in zip(drivers, before, strict=True):
        if bool(driver.is_active()) != active:
            driver.is_active = staticmethod(lambda active=active: active)


def _purge_dummies() -> None:
    """Remove placeholder modules that vLLM or transformers look for."""
    names = [
        name
        for name, module in sys.modules.items()
        if name.split(".")[0] in PURGED and getattr(module, "__file__", None) == _DUMMY_FILE
    ]
    for name in names:
        del sys.modules[name]


def _group_buffers(sizes_mb: Mapping[str, int]) -> Patch:
    """Return a patch that sets HCCL buffer sizes of megatron-core's groups before they are made.

    Args:
        sizes_mb: MiB by megatron-core's name of a group (``tp``, ``dp``, ``pp``, ``ep``, ...);
            the other groups keep ``HCCL_BUFFSIZE``. A communicator holds two buffers.
    """

    def make(original: Any) -> Any:
        def options_of(pg_name: str, nccl_comm_cfgs: dict[str, Any]) -> Any:
            if pg_name not in sizes_mb:
                return original(pg_name, nccl_comm_cfgs)
            import torch_npu

            options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
            buffer_mb = sizes_mb[pg_name]
            options.hccl_config = {"hccl_buffer_size": buffer_mb, "group_name": pg_name}
            return options

        return options_of

    return Patch(
        target="megatron.core.parallel_state:get_nccl_options",
        parameters=("pg_name", "nccl_comm_cfgs"),
        make=make,
        why="megatron-core has no names for options of HCCL, and MindSpeed's --hccl-group-buffer "
        "needs megatron.training",
        upstream="megatron/core/parallel_state.py",
        versions="megatron-core 0.16.1, torch_npu 2.10.0.post4 and 2.13.0",
        remove_when="MindSpeed's feature works with megatron-core alone",
    )
