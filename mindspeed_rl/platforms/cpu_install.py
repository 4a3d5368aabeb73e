"""Makes megatron-core run on the CPU in place of CUDA.

megatron-core uses ``torch.cuda`` and the device ``"cuda"`` throughout its training path. Inside
``megatron.core`` modules (and only there) the name ``torch`` is bound to a facade that maps these
names to the CPU; vLLM and transformers in the same process see an unchanged torch. An import hook
binds modules that are imported later, so that none is missed.

Why: megatron-core has no CPU path for RoPE, DDP buffers, p2p, gradient clipping.
Upstream: https://github.com/NVIDIA/Megatron-LM (no plan for CPU training is known).
Versions: megatron-core 0.16.1 with torch 2.13.0.
Remove when: megatron-core takes its device from ``torch.accelerator`` or from a config.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_rl.core.patching import Patch, apply_patch

_CPU = torch.device("cpu")
_PREFIX = "megatron.core"
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")


class _Stream:
    """A stream or event of a device that runs everything in order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def _nothing(self, *args: object) -> _Stream:
        return self

    wait_stream = wait_event = record_event = record = wait = synchronize = _nothing


class _Facade(types.ModuleType):
    """A module that has some names of its own and forwards the others to another module."""

    def __init__(self, base: types.ModuleType, **own: Any) -> None:
        super().__init__(base.__name__)
        self.__dict__.update(own, _base=base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def call(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            device = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, device=device, **kwargs)

    return call


def _make_facade() -> types.ModuleType:
    def nothing(*args: object, **kwargs: object) -> None: ...

    cuda = _Facade(
        torch.cuda,
        current_device=lambda: _CPU,
        synchronize=nothing,
        empty_cache=nothing,
        Stream=_Stream,
        Event=_Stream,
        stream=lambda stream=None: stream or _Stream(),
        current_stream=_Stream,
        default_stream=_Stream,
        get_rng_state=lambda *_, **__: torch.get_rng_state(),
        set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
    )
    return _Facade(torch, cuda=cuda, **{n: _on_cpu(getattr(torch, n)) for n in _FACTORIES})


class _ShimmingLoader(importlib.abc.Loader):
    """Runs a module's own loader, then binds the facade."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        _bind(module)


class _ShimmingFinder(importlib.abc.MetaPathFinder):
    """Sends imports of ``megatron.core`` modules through :class:`_ShimmingLoader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _is_megatron(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.abc.Loader):
            spec.loader = _ShimmingLoader(spec.loader)
        return spec


_FACADE = _make_facade()
_FINDER = _ShimmingFinder()


def _is_megatron(name: str) -> bool:
    return name == _PREFIX or name.startswith(_PREFIX + ".")


def _bind(module: types.ModuleType) -> None:
    if vars(module).get("torch") is torch:
        vars(module)["torch"] = _FACADE
        for found in list(vars(module).values()):
            if isinstance(found, type) and found.__module__ == module.__name__:
                _bind_defaults(found)


def _bind_defaults(owner: type) -> None:
    """Replace the factories among the defaults of methods, which were bound before the facade."""
    factories = {id(getattr(torch, name)): getattr(_FACADE, name) for name in _FACTORIES}
    for method in vars(owner).values():
        if isinstance(method, types.FunctionType) and method.__defaults__:
            method.__defaults__ = tuple(factories.get(id(d), d) for d in method.__defaults__)


def _called_from_megatron() -> bool:
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return _is_megatron(caller)


def _patch_tensor_methods() -> None:
    """Patch ``t.cuda()`` and ``t.type()`` for callers in megatron.core."""
    real_type, real_cuda = torch.Tensor.type, torch.Tensor.cuda
    if getattr(real_type, "_mindspeed_rl", False):
        return

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(self, *args, **kwargs)
        if isinstance(answer, str) and _called_from_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_from_megatron() else real_cuda(self, *args, **kwargs)

    type_._mindspeed_rl = True  # type: ignore[attr-defined]
    torch.Tensor.type = type_  # type: ignore[assignment,method-assign]
    torch.Tensor.cuda = cuda  # type: ignore[assignment,method-assign]


_RNG_GET = Patch(
    target="megatron.core.tensor_parallel.random:_get_cuda_rng_state",
    parameters=("device", "clone", "graph_safe"),
    make=lambda original: lambda *args, **kwargs: torch.get_rng_state(),
    why="the tracker of parallel random states reads the CUDA generator through torch.cuda._lazy*",
    upstream="megatron/core/tensor_parallel/random.py",
    versions="megatron-core 0.16.1",
    remove_when="as the module",
)
_RNG_SET = Patch(
    target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
    parameters=("new_state", "device", "graph_safe"),
    make=lambda original: lambda new_state, *args, **kwargs: torch.set_rng_state(new_state),
    why="counterpart of _get_cuda_rng_state",
    upstream="megatron/core/tensor_parallel/random.py",
    versions="megatron-core 0.16.1",
    remove_when="as the module",
)


def install() -> None:
    """Shim every loaded and every later ``megatron.core`` module. Idempotent."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    for name, module in list(sys.modules.items()):
        if _is_megatron(name) and module is not None:
            _bind(module)
    _patch_tensor_methods()
    apply_patch(_RNG_GET)
    apply_patch(_RNG_SET)
