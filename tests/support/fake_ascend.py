"""vLLM-Ascend 0.23 as its sources say: memory pool, worker, experts, latent attention.

``tests/ascend`` runs its own classes. Memory is real:
what the pool unmaps is overwritten, so that whatever was not saved is lost.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.rollout.engine import GenerationRequest, SamplingSettings
from mindspeed_rl.rollout.provider import EngineSettings
from mindspeed_rl.rollout.vllm.engine import VllmEngine
from mindspeed_rl.rollout.vllm.layout import VllmLayout
from mindspeed_rl.rollout.vllm_ascend.backend import AscendBackend

GARBAGE = 0xC7


class FakeNpu(CpuPlatform):
    """A CPU by the name of an NPU."""

    name = "npu"

    def release_cached_memory(self) -> None:
        """Nothing is cached here."""


@dataclass
class Allocation:
    """One mapping of the pool; ``keeps`` holds the memory itself."""

    handle: tuple[int, int, int, int]
    tag: str
    keeps: torch.Tensor
    cpu_backup_tensor: torch.Tensor | None = None
    mapped: bool = True


class FakePool:
    """The module ``camem`` and its allocator in one."""

    def __init__(self) -> None:
        self.pointer_to_data: dict[int, Allocation] = {}
        self.copied_bytes: Counter[int] = Counter()
        self.CaMemAllocator = SimpleNamespace(get_instance=lambda: self)

    def place(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        """A contiguous copy in the pool."""
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        handle = (0, copy.numel() * copy.element_size(), copy.data_ptr(), 0)
        self.pointer_to_data[copy.data_ptr()] = Allocation(handle, tag, copy)
        return copy

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        """The contents are gone."""
        data = self.pointer_to_data[handle[2]]
        assert data.mapped, "unmapped twice"
        ctypes.memset(handle[2], GARBAGE, handle[1])
        data.mapped = False

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        """Fresh memory: what was there before is not."""
        data = self.pointer_to_data[handle[2]]
        assert not data.mapped, "mapped twice"
        ctypes.memset(handle[2], GARBAGE, handle[1])
        data.mapped = True

    def memcpy(self, to: int, limit: int, source: int, size: int, kind: int) -> int:
        """From the device to the host (2) or back (1); a status, 0 for success."""
        assert size <= limit and kind in (1, 2)
        device = source if kind == 2 else to
        for ptr, data in self.pointer_to_data.items():
            if ptr <= device < ptr + data.handle[1]:
                assert data.mapped and device + size <= ptr + data.handle[1]
                self.copied_bytes[kind] += size
                ctypes.memmove(to, source, size)
                return 0
        return 107001

    def wake_up(self, tags: Sequence[str]) -> None:
        """Map, restore what was saved."""
        for ptr, data in self.pointer_to_data.items():
            if data.tag in tags:
                assert not data.mapped, "mapped twice"
                data.mapped = True
                if (saved := data.cpu_backup_tensor) is not None:
                    ctypes.memmove(ptr, saved.data_ptr(), data.handle[1])
                    data.cpu_backup_tensor = None


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


class FakeMethod:
    """Processing of experts: a turn, with a new parameter that has no loader."""

    def __init__(self, pool: FakePool) -> None:
        self._pool = pool
        self.turns = 0

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Loader layout to kernel layout, in the same memory where it is the transpose."""
        self.turns += 1
        for name in ("w13_weight", "w2_weight"):
            turned = getattr(layer, name).data.transpose(1, 2)
            if not turned.is_contiguous():
                turned = self._pool.place(turned, "weights")
            layer.register_parameter(name, _parameter(turned))


class FakeExperts(torch.nn.Module):
    """The owner of the experts, with the loader that its parameters lose."""

    def weight_loader(self, param: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        """Copy a whole stack in loader layout."""
        param.data.copy_(loaded)


class FakeLatent(torch.nn.Module):
    """The implementation of latent attention: two products of its up projection."""

    def __init__(self, kv_b_proj: torch.nn.Module, pool: FakePool) -> None:
        super().__init__()
        self._pool = pool
        self.source = [kv_b_proj]

    def products(self) -> list[torch.Tensor]:
        """What the two must be."""
        first, second = self.source[0].weight.data.chunk(2)  # type: ignore[union-attr,operator]
        return [first.t().contiguous(), second.clone()]

    def process_weights_after_loading(self) -> None:
        """New tensors once, in place from then on."""
        products = self.products()
        if not hasattr(self, "W_UV"):
            self.W_UV, self.W_UK_T = (self._pool.place(p, "weights") for p in products)
        else:
            self.W_UV.copy_(products[0])
            self.W_UK_T.copy_(products[1])


def submodule(
    root: torch.nn.Module, path: str, kind: type[torch.nn.Module] = torch.nn.Module
) -> Any:
    """The module at a path, made where it is missing."""
    at = root
    *parents, last = path.split(".")
    for name in parents:
        if not hasattr(at, name):
            at.add_module(name, torch.nn.Module())
        at = getattr(at, name)
    if not hasattr(at, last):
        at.add_module(last, kind())
    return getattr(at, last)


class FakeModel(torch.nn.Module):
    """Parameters of a layout, in the engine's own module tree, loaded once."""

    def __init__(self, layout: VllmLayout, pool: FakePool) -> None:
        super().__init__()
        self.methods: list[FakeMethod] = []
        self.latent: list[FakeLatent] = []
        self.stray = [pool.place(torch.arange(5.0), "weights")]
        for name, shape in layout.local_shapes(0).items():
            expert = name.endswith(("w13_weight", "w2_weight"))
            kind = FakeExperts if expert else torch.nn.Module
            owner = submodule(self, name.rpartition(".")[0], kind)
            value = torch.randn(shape)
            if expert:
                value = value.transpose(1, 2)  # as its loader wants it
                if not hasattr(owner, "quant_method"):
                    owner.quant_method = FakeMethod(pool)
                    self.methods.append(owner.quant_method)
            owner.register_parameter(
                name.rpartition(".")[2], _parameter(pool.place(value, "weights"))
            )
            if name.endswith("kv_b_proj.weight"):
                self.latent.append(FakeLatent(owner, pool))
        self.process()

    def process(self) -> None:
        """Of the whole model, after loading."""
        for module in self.modules():
            if isinstance(getattr(module, "quant_method", None), FakeMethod):
                module.quant_method.process_weights_after_loading(module)
        for latent in self.latent:
            latent.process_weights_after_loading()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """By our names; experts go through their loader and fail where it is lost."""
        for name, value in weights:
            param = self.get_parameter(name)
            if name.endswith(("w13_weight", "w2_weight")):
                param.weight_loader(param, value.transpose(1, 2))
            else:
                param.data.copy_(value)


class FakeWorker:
    """Its waking maps memory and turns experts."""

    def __init__(self, model: FakeModel, pool: FakePool, hidden: int) -> None:
        self._pool, self._hidden = pool, hidden
        self.model = model
        self.cache = pool.place(torch.ones(4, 64), "kv_cache")
        layer = SimpleNamespace(kv_cache=[self.cache])
        context = SimpleNamespace(static_forward_context={"layer": layer})
        self.model_runner = SimpleNamespace(kv_caches=[self.cache], compilation_config=context)

    def get_model(self) -> FakeModel:
        """Unwrapped."""
        return self.model

    def wake_up(self, tags: Sequence[str]) -> None:
        """Experts are turned by what their shape looks like."""
        self._pool.wake_up(tags)
        if "weights" not in tags:
            return
        for module in self.model.modules():
            for name, axis in (("w2_weight", 2), ("w13_weight", 1)):
                param = getattr(module, name, None)
                if param is not None and param.shape[axis] == self._hidden:
                    module.register_parameter(name, _parameter(param.data.transpose(1, 2)))


class AscendDouble(VllmEngine):
    """The product's engine and backend around the fakes.

    Attributes:
        worker: of the fakes.
        pool: its memory.
        configuration: what the engine says of itself.
        formats: what torch_npu says of its parameters, in order.
    """

    def __init__(self, layout: VllmLayout, model_dir: str, **more: Any) -> None:
        self.configuration = SimpleNamespace(weight_nz_mode=0)
        self.formats = [2] * len(layout.local_shapes(0))
        self.pool = FakePool()
        self.worker = FakeWorker(FakeModel(layout, self.pool), self.pool, layout.spec.hidden_size)
        settings = EngineSettings(model_dir, layout, 0, "float32", 16, 1 << 20, 0, {}, **more)
        super().__init__(settings, FakeNpu())

    def _modules(self, name: str) -> Any:
        @contextmanager
        def set_current_vllm_config(config: Any) -> Iterator[None]:
            yield

        def process(model: FakeModel, model_config: Any, device: torch.device) -> None:
            model.process()

        return {
            "vllm_ascend.device_allocator.camem": self.pool,
            "vllm_ascend.ascend_config": SimpleNamespace(
                get_ascend_config=lambda: self.configuration
            ),
            "vllm_ascend.envs": SimpleNamespace(VLLM_ASCEND_ENABLE_NZ=0),
            "vllm.config": SimpleNamespace(set_current_vllm_config=set_current_vllm_config),
            "vllm.model_executor.model_loader.utils": SimpleNamespace(
                process_weights_after_loading=process
            ),
        }[name]

    def _backend(self, *about: Any) -> AscendBackend:
        return AscendBackend(
            *about,
            modules=self._modules,
            format_of=lambda param: self.formats.pop(0),
        )

    def _build(self, model_dir: str, settings: dict[str, Any]) -> Any:
        self.settings = settings
        engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=self.worker)),
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32)),
        )
        return SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: True)

    def _run(
        self, requests: Sequence[GenerationRequest], settings: SamplingSettings
    ) -> dict[int, Any]:
        raise AssertionError("nothing is generated here")
