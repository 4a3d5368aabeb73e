"""vLLM-Ascend 0.23.0's own classes through sleep, wake, load and process, driven by us.

Real: its unquantized experts, its worker's ``wake_up``, its allocator's bookkeeping, vLLM's latent
attention with Ascend's implementation below it, its processing of a model. Ours: the engine and its
backend. Emulated: virtual memory, which loses what was not saved.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_ascend import GARBAGE
from support.layout_cases import GQA, LATENT, MOE, Case, spec_of

from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.vllm.engine import VllmEngine
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.models.layers import LatentAttention
from mindspeed_rl.platforms.allocator_settings import WANTED
from mindspeed_rl.rollout.engine import EngineState
from mindspeed_rl.rollout.provider import EngineSettings

pytestmark = pytest.mark.ascend_emul

VERSION = "0.23.0"
CASES = {
    "dense": GQA,
    "experts": MOE,
    "square w2": replace(MOE, hidden=16, expert_ffn=16),
    "square w13": replace(MOE, hidden=16, expert_ffn=8),
    "latent": LATENT,
}


@pytest.fixture(scope="module")
def real() -> SimpleNamespace:
    """What of vLLM and vLLM-Ascend runs here, on emulated virtual memory."""
    from ascend.emulator import stand_ins
    from ascend.emulator.device import emulate

    emulate()
    stand_ins.install("acl", "triton", *stand_ins.VLLM_NEEDS)
    os.environ.update({"VLLM_ASCEND_ENABLE_NZ": "0", "VLLM_VERSION": VERSION})
    import vllm_ascend.ascend_config as config
    import vllm_ascend.patch.worker.patch_process_weights_after_loading  # noqa: F401
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm_ascend.attention.mla_v1 import AscendMLAImpl
    from vllm_ascend.device_allocator import camem
    from vllm_ascend.ops.fused_moe.fused_moe import AscendUnquantizedFusedMoEMethod
    from vllm_ascend.worker.worker import NPUWorker

    config._ASCEND_CONFIG = SimpleNamespace(
        weight_nz_mode=0, enable_fused_mc2=0, ascend_compilation_config=None, eplb_config=None
    )
    camem.python_unmap_and_release = lambda _, size, ptr, __: ctypes.memset(ptr, GARBAGE, size)
    camem.python_create_and_map = lambda *handle: None
    camem.memcpy = lambda to, limit, source, size, kind: 0 * ctypes.memmove(to, source, size)
    gc.freeze()  # every release of memory collects garbage, among what was imported as well
    return SimpleNamespace(
        camem=camem,
        MLAAttention=MLAAttention,
        AscendMLAImpl=AscendMLAImpl,
        ExpertsMethod=AscendUnquantizedFusedMoEMethod,
        LinearMethod=UnquantizedLinearMethod,
        NPUWorker=NPUWorker,
    )


class Experts(torch.nn.Module):
    """The owner of the experts, with the loader that its parameters lose."""

    def weight_loader(self, param: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        """Copy a whole stack in loader layout."""
        param.data.copy_(loaded)


def submodule(root: torch.nn.Module, path: str, kind: type[torch.nn.Module]) -> Any:
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


class RealEngine(VllmEngine):
    """The product's engine around a model of real methods in the engine's module tree.

    Attributes:
        model: its parameters are those of the layout.
        stray: a plain tensor in the pool of the weights.
        cache: the key/value cache.
        settings: what vLLM would be built with.
    """

    def __init__(self, real: SimpleNamespace, layout: VllmLayout, model_dir: str) -> None:
        from mindspeed_rl.platforms.npu import NpuPlatform

        self._real = real
        self._layout = layout
        self.pool = real.camem.CaMemAllocator.get_instance()
        self.pool.pointer_to_data.clear()
        self._kept: list[torch.Tensor] = []
        self.cache = self._placed(torch.ones(4, 64), "kv_cache")
        self.stray = self._placed(torch.arange(5.0), "weights")
        self.model = self._loaded_model()
        settings = EngineSettings(model_dir, layout, 0, "bfloat16", 16, 1 << 20, 0, {})
        super().__init__(settings, NpuPlatform())

    def _placed(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        """A copy on the device, known to the real allocator."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="npu")
        copy.copy_(tensor)
        self._kept.append(copy)
        data = self._real.camem.AllocationData(
            (0, copy.numel() * copy.element_size(), copy.data_ptr(), 0), tag
        )
        self.pool.pointer_to_data[copy.data_ptr()] = data
        return copy

    def _loaded_model(self) -> torch.nn.Module:
        """As after the first loading: in loader layout, then processed by the engine."""
        model = torch.nn.Module()
        for name, shape in self._layout.local_shapes(0).items():
            path, _, attribute = name.rpartition(".")
            expert = attribute in ("w13_weight", "w2_weight")
            owner = submodule(model, path, Experts if expert else torch.nn.Module)
            value = torch.randn(shape, dtype=torch.bfloat16)
            if expert:
                method = object.__new__(self._real.ExpertsMethod)
                torch.nn.Module.__init__(method)
                owner.quant_method = method
                value = value.transpose(1, 2).contiguous()
            elif attribute == "weight":
                owner.quant_method = object.__new__(self._real.LinearMethod)
            owner.register_parameter(
                attribute, torch.nn.Parameter(self._placed(value, "weights"), requires_grad=False)
            )
            if name.endswith("kv_b_proj.weight"):
                parent = model.get_submodule(path.rpartition(".")[0])
                parent.add_module("mla_attn", self._latent(owner))
        self._process(model)
        for module in model.modules():
            for attribute in ("w13_weight", "w2_weight"):
                if hasattr(module, attribute):  # the processed copy is what the pool holds
                    placed = self._placed(getattr(module, attribute).data, "weights")
                    getattr(module, attribute).data = placed
            impl = getattr(module, "impl", None)
            if impl is not None:
                impl.W_UV = self._placed(impl.W_UV, "weights")
                impl.W_UK_T = self._placed(impl.W_UK_T, "weights")
        model.load_weights = self._load  # type: ignore[assignment]
        return model

    def _latent(self, kv_b_proj: torch.nn.Module) -> torch.nn.Module:
        from vllm.model_executor.layers.attention.attention import set_default_quant_scales

        latent = self._layout.spec.attention
        assert isinstance(latent, LatentAttention)
        shared = {
            "kv_b_proj": kv_b_proj,
            "kv_lora_rank": latent.kv_lora_rank,
            "num_heads": latent.num_heads,
            "qk_nope_head_dim": latent.nope_head_dim,
            "v_head_dim": latent.v_head_dim,
        }
        attention = object.__new__(self._real.MLAAttention)
        torch.nn.Module.__init__(attention)
        impl = object.__new__(self._real.AscendMLAImpl)
        impl.__dict__.update(
            shared, enable_mlapo=False, fa_quant_layer=False, layer_sharding_kwargs=[]
        )
        attention.__dict__.update(
            {name: value for name, value in shared.items() if name != "kv_b_proj"},
            kv_b_proj=kv_b_proj, impl=impl, quant_config=None,
            is_aiter_triton_fp4_bmm_enabled=False, is_aiter_triton_fp8_bmm_enabled=False,
        )  # fmt: skip
        set_default_quant_scales(attention, register_buffer=True)
        original = attention.process_weights_after_loading

        def wrapped(act_dtype: torch.dtype) -> None:
            """As AscendMultiHeadLatentAttention puts it around the layer's own."""
            original(act_dtype)
            impl.process_weights_after_loading(act_dtype)

        attention.process_weights_after_loading = wrapped
        return attention

    def _process(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.model_loader import utils

        config = SimpleNamespace(dtype=torch.bfloat16, quantization=None)
        utils.process_weights_after_loading(model, config, torch.device("npu:0"))

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            param = self.model.get_parameter(name)
            if name.endswith(("w13_weight", "w2_weight")):
                param.weight_loader(param, value.transpose(1, 2))
            else:
                param.data.copy_(value)

    def _build(self, model_dir: str, settings: dict[str, Any]) -> Any:
        self.settings = settings
        hidden = SimpleNamespace(hidden_size=self._layout.spec.hidden_size)
        model_config = SimpleNamespace(
            dtype=torch.bfloat16, quantization=None, hf_text_config=hidden
        )
        worker = object.__new__(self._real.NPUWorker)
        worker._sleep_saved_buffers = {}
        worker.vllm_config = SimpleNamespace(quant_config=None, model_config=model_config)
        layer = SimpleNamespace(kv_cache=[self.cache])
        worker.model_runner = SimpleNamespace(
            model=self.model,
            get_model=lambda: self.model,
            sampler=SimpleNamespace(
                logprobs_mode="raw_logprobs",
                topk_topp_sampler=SimpleNamespace(logprobs_mode="raw_logprobs"),
            ),
            kv_caches=[self.cache],
            compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        )
        executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
        engine = SimpleNamespace(model_executor=executor, vllm_config=worker.vllm_config)
        return SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: True)


def check(engine: RealEngine, expected: dict[str, torch.Tensor]) -> None:
    """What the kernels read."""
    for name, param in engine.model.named_parameters():
        assert torch.equal(param.data.cpu(), expected[name]), name
        assert param.is_contiguous(), name
    latent = engine._layout.spec.attention
    for module in engine.model.modules():
        impl = getattr(module, "impl", None)
        if impl is None or not isinstance(latent, LatentAttention):
            continue
        wide = latent.nope_head_dim + latent.v_head_dim
        heads = impl.kv_b_proj.weight.data.cpu().view(-1, wide, latent.kv_lora_rank)
        keys, values = heads.split([latent.nope_head_dim, latent.v_head_dim], 1)
        assert torch.equal(impl.W_UK_T.cpu(), keys)
        assert torch.equal(impl.W_UV.cpu(), values.transpose(1, 2))
    assert torch.equal(engine.stray.cpu(), torch.arange(5.0))


Make = Callable[[str], RealEngine]


@pytest.fixture
def make(real: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Name of a case -> its engine."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "1")

    def engine_of(name: str) -> RealEngine:
        layout = VllmLayout(
            spec_of(CASES[name]), EngineLayout(1, 1), transposed_experts=True,
            expert_module="mlp.experts",
        )  # fmt: skip
        return RealEngine(real, layout, str(tmp_path))

    return engine_of


def new_weights(engine: RealEngine, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(view.shape, generator=generator).bfloat16()
        for key, view in engine.weight_views().items()
    }


def update(engine: RealEngine, version: int, *, by_loader: bool = False) -> dict[str, torch.Tensor]:
    """Write other weights, look at what kernels read, and return what was written."""
    engine.begin_update()
    weights = new_weights(engine, version)
    if by_loader:
        for key, value in weights.items():
            engine.load_tensor(key, value.to("npu"))
    else:
        for key, view in engine.weight_views().items():
            assert view.is_contiguous(), "a reshard writes rectangles of it"
            view.copy_(weights[key])
    engine.finish_update(version)
    check(engine, weights)
    assert engine.weights_version == version
    return weights


def sleep(engine: RealEngine) -> None:
    engine.free_cache()
    engine.free_weights()
    first = next(iter(engine.model.parameters())).data
    assert int(first.cpu().view(torch.uint8).flatten()[0]) == GARBAGE


@pytest.mark.parametrize("name", CASES)
def test_three_cycles_of_its_own_classes(
    name: str, make: Make, real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sleep, wake, sync: twice by rectangles, once through its loaders; nothing moves."""
    case: Case = CASES[name]
    turned: list[torch.nn.Module] = []
    turn = real.ExpertsMethod.process_weights_after_loading

    def counted(self: Any, layer: torch.nn.Module) -> None:
        turned.append(layer)
        turn(self, layer)

    monkeypatch.setattr(real.ExpertsMethod, "process_weights_after_loading", counted)
    engine = make(name)
    addresses = {n: p.data_ptr() for n, p in engine.model.named_parameters()}
    if case.experts:
        assert len(engine._derived.params) == 2 * sum(case.moe_layers)
    for version in (1, 2, 3):
        turned.clear()
        sleep(engine)
        engine.wake_weights()
        if case.experts:
            assert all(p.loadable for p in engine._derived.params), "0.23 turns them"
        update(engine, version, by_loader=version == 2)
        engine.wake_cache()
        assert engine.state is EngineState.AWAKE and engine.weights_version == version
        assert torch.count_nonzero(engine.cache.cpu()) == 0
        assert {n: p.data_ptr() for n, p in engine.model.named_parameters()} == addresses
        layers = {id(p.module) for p in engine._derived.params}
        assert len(layers) == sum(case.moe_layers if case.experts else ())
        assert sorted(map(id, turned)) == sorted(layers), "its method turns each layer once"


def test_updates_without_sleep(make: Make) -> None:
    """The engine keeps its memory; and one update is given up half-way by a sleep."""
    engine = make("square w2")
    for version in (1, 2):
        update(engine, version, by_loader=True)
    engine.begin_update()
    sleep(engine)
    engine.wake_weights()
    assert engine.weights_version == -1 and engine.state is EngineState.WEIGHTS
    update(engine, 3)


def test_only_the_cache_sleeps(make: Make) -> None:
    engine = make("experts")
    weights = update(engine, 1)
    engine.free_cache()
    assert engine.state is EngineState.WEIGHTS
    assert int(engine.cache.cpu().view(torch.uint8).flatten()[0]) == GARBAGE
    check(engine, weights)
    engine.wake_cache()
    assert engine.state is EngineState.AWAKE and engine.weights_version == 1
    assert torch.count_nonzero(engine.cache.cpu()) == 0
    check(engine, weights)


def test_segments_expand_while_the_weights_are_away(
    make: Make, real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off while the pool is filled and mapped, on in between, where the user asked."""
    memory = importlib.import_module("torch_npu.npu.memory")
    seen: list[str] = []

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name not in seen[-1:]:
                seen.append(name)
            return original(*args)

        return call

    for name in ("unmap_and_release", "create_and_map"):
        monkeypatch.setattr(real.camem, name, noted(name, getattr(real.camem, name)))
    monkeypatch.setattr(memory, "_set_allocator_settings", seen.append)
    for wanted in ("0", "1"):
        monkeypatch.setenv(WANTED, wanted)
        engine = make("experts")
        sleep(engine)
        engine.wake_weights()
    off, on = "expandable_segments:False", "expandable_segments:True"
    away, back = "unmap_and_release", "create_and_map"
    assert seen == [away, back, off, away, on, off, back]


def test_a_version_that_turns_behind_our_back_is_caught(
    make: Make, real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processing that leaves experts as loaded, and one that moves them."""

    def moves(_: Any, layer: torch.nn.Module) -> None:
        for name in ("w13_weight", "w2_weight"):
            turned = getattr(layer, name).data.transpose(1, 2).clone()
            layer.register_parameter(name, torch.nn.Parameter(turned, requires_grad=False))

    engine, name = make("experts"), "process_weights_after_loading"
    for method, said in (
        (lambda *_: None, "processing left it in loader layout"),
        (moves, r"is neither the kernel layout .* nor its transpose"),
    ):
        monkeypatch.setattr(real.ExpertsMethod, name, method)
        engine.begin_update()
        with pytest.raises(RuntimeError, match=said):
            engine.finish_update(1)


def test_the_engine_is_built_for_updates(make: Make) -> None:
    """Arguments that training needs."""
    engine = make("experts")
    assert engine.settings["enable_sleep_mode"]
    assert engine.settings["kv_cache_memory_bytes"] == 1 << 20
    assert engine.settings["enforce_eager"] and engine.settings["load_format"] == "dummy"
    assert os.environ["VLLM_ASCEND_ENABLE_NZ"] == "0", "the other place that is asked"
    told = engine.weight_format
    assert told.startswith("engine weights: not in NZ; formats of the ")
    assert ": 2; weight_nz_" in told


def test_an_engine_with_nz_weights_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm_ascend.ascend_config as config

    with (
        monkeypatch.context() as patch,
        pytest.raises(RuntimeError, match=r"NZ format \(model\..* has format 29\)"),
    ):
        patch.setattr("mindspeed_rl.engines.vllm_ascend.backend.memory_format", lambda param: 29)
        make("dense")
    monkeypatch.setattr(config._ASCEND_CONFIG, "weight_nz_mode", 1)
    with pytest.raises(RuntimeError, match=r"NZ format \(weight_nz_mode = 1\)"):
        make("dense")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("mine", "other"), [((3, 2), (7, 2)), ((9, 2), (1, 0)), ((1, 1), (1, 2))])
def test_the_packed_reduction_says_what_its_own_says(
    mine: tuple[int, int], other: tuple[int, int], padded: bool, real: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Tokens and graph modes of two data-parallel ranks, through 0.23.0's own function and ours."""
    import torch.distributed as dist
    from vllm.config import CUDAGraphMode
    from vllm.distributed import parallel_state
    from vllm_ascend.worker import model_runner_v1

    from mindspeed_rl.vllm_patches import step_sync

    def add_the_other_rank(vector: torch.Tensor, group: object) -> None:
        flat = vector.view(-1)
        flat[1] += other[0]
        flat[3] += other[1]

    group = SimpleNamespace(world_size=2, device="cpu", device_group=None, cpu_group=None)
    monkeypatch.setattr(dist, "all_reduce", add_the_other_rank)
    for module in (parallel_state, model_runner_v1):
        monkeypatch.setattr(module, "get_dp_group", lambda: group)
    monkeypatch.setattr(model_runner_v1, "should_skip_allreduce_across_dp_group", lambda *_: False)
    runner = object.__new__(model_runner_v1.NPUModelRunner)
    runner.__dict__.update(
        dp_size=2, dp_rank=0, vllm_config=None,
        ascend_config=SimpleNamespace(dp_allreduce_on_npu=False),
    )  # fmt: skip
    own = model_runner_v1.NPUModelRunner._sync_metadata_across_dp
    results = []
    for function in (own, step_sync._ascend_reduction(own)):
        most, per_rank, mode = function(
            runner, mine[0], cudagraph_mode=CUDAGraphMode(mine[1]), allow_dp_padding=padded
        )
        results.append((most, per_rank.tolist(), per_rank.dtype, mode))
    assert results[0] == results[1]
    assert results[0][0] == max(mine[0], other[0])
