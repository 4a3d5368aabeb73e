"""The pool of vLLM's sleep mode on CUDA: its own allocator over memory of the host.

What its extension unmaps is overwritten, so that whatever was not saved is lost.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.cuda_wheel import OLDER, older_file
from support.fake_ascend import GARBAGE
from support.layout_cases import GQA, spec_of

from mindspeed_rl.config import EngineTuningConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.vllm.cuda_backend import CudaBackend
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.platforms.cached_memory import free_ranges
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.vllm_patches import seeded_draws


class Device(CpuPlatform):
    """The platform that the backend is for, on the host."""

    name = "cuda"


class Pool:
    """vLLM's allocator with an extension whose mappings are memory of the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.device_allocator import cumem

        self.mapped: dict[int, bool] = {}
        self.kept: list[torch.Tensor] = []
        self.copied = 0
        monkeypatch.setattr(cumem, "cumem_available", True)
        monkeypatch.setattr(cumem, "python_create_and_map", self._map)
        monkeypatch.setattr(cumem, "python_unmap_and_release", self._unmap)
        monkeypatch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=self._copy))
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
        monkeypatch.setattr(cumem.CuMemAllocator, "instance", None)
        # the older release registers nothing
        monkeypatch.setattr(cumem, "atexit", SimpleNamespace(register=id), raising=False)
        self.allocator = cumem.CuMemAllocator.get_instance()

    def place(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        """A copy in the pool, as the extension's callback tells the allocator."""
        copy = tensor.clone()
        self.kept.append(copy)
        self.allocator.current_tag = tag
        handle = (0, copy.numel() * copy.element_size(), copy.data_ptr(), 0)
        self.allocator.python_malloc_callback(handle)
        self.mapped[copy.data_ptr()] = True
        return copy

    def _map(self, _device: int, size: int, pointer: int, _handle: int) -> None:
        assert not self.mapped[pointer], "mapped twice"
        ctypes.memset(pointer, GARBAGE, size)
        self.mapped[pointer] = True

    def _unmap(self, _device: int, size: int, pointer: int, _handle: int) -> None:
        assert self.mapped[pointer], "unmapped twice"
        ctypes.memset(pointer, GARBAGE, size)
        self.mapped[pointer] = False

    def _copy(self, to: int, source: int, size: int) -> None:
        self.copied += size
        ctypes.memmove(to, source, size)


def built(pool: Pool, *, v2: bool = False) -> Any:
    """An engine whose worker has a model of one weight and one buffer, and a cache."""
    model = torch.nn.Module()
    whole = pool.place(torch.arange(24.0), "weights")
    model.register_parameter("weight", torch.nn.Parameter(whole[4:20].view(4, 4)))
    model.register_buffer("table", pool.place(torch.full((7,), 3.0), "weights"))
    cache = pool.place(torch.ones(2, 8), "kv_cache")
    pool.place(torch.full((5,), 2.0), "workspace")
    runner = SimpleNamespace(
        kv_caches=[cache], compilation_config=SimpleNamespace(static_forward_context={})
    )

    def wake_up(tags: list[str]) -> None:
        pool.allocator.wake_up(tags)

    worker = SimpleNamespace(
        model_runner=runner, get_model=lambda: model, wake_up=wake_up, use_v2_model_runner=v2
    )
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    config = SimpleNamespace(dtype=torch.float32)
    return SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor, model_config=config))


def backend(**flags: Any) -> CudaBackend:
    settings = SimpleNamespace(
        layout=VllmLayout(spec_of(GQA), EngineLayout(1, 1)), graph_sizes=(), force_balance=False,
        tuning=EngineTuningConfig(**flags),
    )  # fmt: skip
    return CudaBackend(cast(Any, settings), Device())


def use_older_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the release which belongs to torch 2.11, on the rest of the installed one."""
    import vllm.device_allocator

    name, file = "vllm.device_allocator.cumem", older_file("vllm.device_allocator.cumem")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(vllm.device_allocator, "cumem", module, raising=False)


@pytest.mark.parametrize("release", ["installed", OLDER])
def test_weights_and_cache_leave_and_return_at_their_addresses(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if release == OLDER:
        use_older_pool(monkeypatch)
    pool = Pool(monkeypatch)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    llm = built(pool)
    parts = backend().parts(llm)
    assert parts.stable_addresses, "graphs stay valid"
    assert (parts.weights.num_bytes, parts.cache.num_bytes) == (4 * (24 + 7), 4 * 16)
    model: Any = parts.model
    addresses = model.weight.data_ptr(), model.table.data_ptr()
    for cycle in (1, 2):
        model.weight.data.fill_(9.0)
        parts.cache.free()
        parts.weights.free()
        assert sorted(pool.mapped.values()) == [False, False, False, True], "but the workspace"
        parts.weights.bring_back()
        assert torch.count_nonzero(model.weight) == 0, "the update writes it"
        assert torch.equal(model.table, torch.full((7,), 3.0)), "no update writes it"
        assert sorted(pool.mapped.values()) == [False, True, True, True], "the cache comes later"
        parts.cache.bring_back()
        assert torch.count_nonzero(pool.kept[2]) == 0
        assert all(pool.mapped.values())
        assert pool.copied == 2 * cycle * 4 * (8 + 7), "what no update writes, there and back"
    assert (model.weight.data_ptr(), model.table.data_ptr()) == addresses
    assert {data.tag for data in pool.allocator.pointer_to_data.values()} == {
        "weights", "kv_cache", "workspace",
    }  # fmt: skip


def test_a_built_runner_draws_by_seeds_and_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, once the device is known to compute the same noise."""
    called: list[str] = []
    for name in ("check_noise", "apply"):
        monkeypatch.setattr(seeded_draws, name, lambda *_, name=name: called.append(name))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    backend().parts(built(Pool(monkeypatch)))
    assert called == ["check_noise", "apply"]


def test_another_runner_is_refused_before_it_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="model runner V2 in spite of VLLM_USE_V2_MODEL_RUNNER=0"):
        backend().parts(built(Pool(monkeypatch), v2=True))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(UsageError, match="unset VLLM_USE_V2_MODEL_RUNNER"):
        backend()


def test_the_backend_refuses_what_the_dry_run_refuses() -> None:
    with pytest.raises(UsageError, match="use full-decode, or eager"):
        backend(rollout_graph_mode="piecewise")
    with pytest.raises(UsageError, match="needs vLLM-Ascend, this is cuda"):
        backend(rollout_multistream_moe=True)


def test_cached_memory_of_no_tensor_is_found() -> None:
    """In the keys of ``torch.cuda.memory_snapshot``."""
    segments = [
        {"address": 100, "blocks": [
            {"size": 10, "state": "inactive"}, {"size": 30, "state": "active_allocated"},
            {"size": 5, "state": "inactive"},
        ]},
        {"address": 900, "blocks": [{"size": 8, "state": "active_pending_free"}]},
    ]  # fmt: skip
    assert free_ranges(segments) == [range(100, 110), range(140, 145)]
