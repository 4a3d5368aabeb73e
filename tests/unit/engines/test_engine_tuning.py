"""Flags of the engine's execution: mistakes are named with the way out; the map of experts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.layout_cases import GQA, LATENT, MOE, spec_of

from mindspeed_rl.config import EngineTuningConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.engines.vllm.cuda_backend import CudaBackend
from mindspeed_rl.engines.vllm.host_backend import HostBackend
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.engines.vllm.tuning import check_copies, check_tuning, mapped_experts
from mindspeed_rl.expert_placement.map_file import read_expert_map
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.platforms.process_state import preserved_environment
from mindspeed_rl.rollout.provider import EngineSettings
from mindspeed_rl.weight_layouts.rollout import Slots

VARIABLE = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"


@pytest.mark.parametrize(
    ("case", "flags", "message"),
    [
        (GQA, {"rollout_graph_sizes": ("auto", "8")}, "allowed are auto alone, or numbers above 0"),
        (GQA, {"rollout_graph_sizes": ("0",)}, "allowed are auto alone, or numbers above 0"),
        (
            GQA,
            {"rollout_graph_mode": "eager", "rollout_graph_sizes": ("8",)},
            "no graphs with --rollout-graph-mode eager",
        ),
        (GQA, {"rollout_multistream_moe": True}, "no experts; remove the flag"),
    ],
)
def test_mistakes_are_named(case: object, flags: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tuning(EngineTuningConfig(**flags), EngineLayout(1, 1), spec_of(case))  # type: ignore[arg-type]


def test_flashcomm_is_refused_where_the_engine_asserts() -> None:
    """Without tensor parallelism, with experts on all ranks, and with sizes that it would drop."""
    flags = EngineTuningConfig(rollout_flashcomm=True)
    graphs = replace(flags, rollout_graph_mode="full-decode", rollout_graph_sizes=("4", "6"))
    spread, sliced = (EngineLayout(4, 4, expert_parallel=ep) for ep in (True, False))
    for tuning, engine, case, message in (
        (flags, EngineLayout(4, 1, 4, True), MOE, "--rollout-tp is 1"),
        (flags, EngineLayout(1, 1), GQA, "--rollout-tp is 1"),
        (flags, sliced, MOE, r"--rollout-ep to --rollout-tp x --rollout-dp \(4\)"),
        (graphs, spread, MOE, "--rollout-graph-sizes 6: .* multiples of --rollout-tp 4"),
    ):
        with pytest.raises(UsageError, match=message):
            check_tuning(tuning, engine, spec_of(case))
    check_tuning(flags, spread, spec_of(MOE))
    check_tuning(flags, sliced, spec_of(GQA))
    check_tuning(replace(graphs, rollout_graph_sizes=("4", "8")), spread, spec_of(MOE))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("dp", [1, 2])
def test_flashcomm_keeps_shared_experts_whole(tp: int, dp: int) -> None:
    """And nothing else: what a rank holds of DeepSeek-V3, beside the layout without the flag."""
    spec, engine = spec_of(LATENT), EngineLayout(tp * dp, tp, dp, expert_parallel=True)
    provider = engine_provider()
    shapes = []
    for flashcomm in (True, False):
        tuning = EngineTuningConfig(rollout_flashcomm=flashcomm)
        layout = provider.layout(spec, engine, tuning)
        assert isinstance(layout, VllmLayout)
        npu = replace(layout, transposed_experts=True, expert_module="mlp.experts")
        shapes.append(dict(npu.local_shapes(1)))
    whole, cut = shapes
    assert whole.keys() == cut.keys()
    shared = {name for name in whole if "shared_experts" in name}
    assert {name for name in whole if whole[name] != cut[name]} == shared and len(shared) == 6
    for name in shared:
        size, ffn = (0, 2) if "gate_up" in name else (1, 1)
        assert whole[name][size] == ffn * LATENT.shared_ffn == tp * cut[name][size], name


def test_sizes_and_flags_that_fit_pass() -> None:
    tuning = EngineTuningConfig(
        rollout_graph_mode="full-decode",
        rollout_graph_sizes=("8", "64"),
        rollout_multistream_moe=True,
    )
    check_tuning(tuning, EngineLayout(1, 1), spec_of(MOE))
    assert mapped_experts(tuning, EngineLayout(1, 1), spec_of(MOE)) == ((), ())


def write_map(path: Path, *layers: list[list[int]]) -> Path:
    content = [
        {"layer_id": i, "device_list": [{"device_expert": experts} for experts in layer]}
        for i, layer in enumerate(layers)
    ]
    path.write_text(json.dumps({"layer_list": content}))
    return path


def test_a_map_needs_experts_that_are_spread() -> None:
    tuning = EngineTuningConfig(rollout_expert_map="m.json")
    with pytest.raises(UsageError, match="set --rollout-ep to --rollout-tp x --rollout-dp"):
        mapped_experts(tuning, EngineLayout(1, 1), spec_of(MOE))
    with pytest.raises(UsageError, match=r"m\.json: the model has no experts; remove the flag"):
        mapped_experts(tuning, EngineLayout(2, 2, expert_parallel=True), spec_of(GQA))


def mapped(path: Path) -> tuple[Slots, tuple[tuple[int, Slots], ...]]:
    """Where a file puts the four experts of both layers, over two ranks of an engine."""
    engine = EngineLayout(2, 2, expert_parallel=True)
    return mapped_experts(EngineTuningConfig(rollout_expert_map=str(path)), engine, spec_of(MOE))


def test_a_map_of_experts_becomes_slots_of_the_layout(tmp_path: Path) -> None:
    """Copies of experts; the layout then sends every copy its weights."""
    devices = [[1, 0, 3], [2, 3, 1], [0, 1, 2], [3, 2, 0]]
    other = [devices[1], devices[0], *devices[2:]]
    path = write_map(tmp_path / "map.json", devices, other, devices)
    spec = spec_of(MOE)
    tuning = EngineTuningConfig(rollout_expert_map=str(path))
    engine = EngineLayout(4, 2, dp=2, expert_parallel=True)
    slots, of_layers = mapped_experts(tuning, engine, spec)
    assert slots == (1, 0, 3, 2, 3, 1, 0, 1, 2, 3, 2, 0)
    assert of_layers == ((spec.expert_layers[1], (2, 3, 1, 1, 0, 3, 0, 1, 2, 3, 2, 0)),)
    layout = VllmLayout(spec, engine, physical_experts=slots, layer_experts=of_layers)
    shapes = layout.local_shapes(0)
    assert {s[0] for name, s in shapes.items() if name.endswith("w13_weight")} == {3}
    with pytest.raises(UsageError, match="several copies of some experts, which needs vLLM-Ascend"):
        check_copies(layout, tuning, "cpu")


def test_every_layer_of_a_map_without_copies_has_its_places(tmp_path: Path) -> None:
    """Those of neighbouring experts need none; further layers are those of other heads."""
    first, second, third = spec_of(MOE).expert_layers
    linear, moved, other = [[0, 1], [2, 3]], [[3, 1], [0, 2]], [[0, 2], [1, 3]]
    path = write_map(tmp_path / "map.json", linear, moved, other, moved)
    assert mapped(path) == ((), ((second, (3, 1, 0, 2)), (third, (0, 2, 1, 3))))
    assert mapped(write_map(path, moved, linear, linear)) == ((), ((first, (3, 1, 0, 2)),))
    assert mapped(write_map(path, linear, linear, linear)) == ((), ())


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([[[0, 1], [2, 3]]], "it has 1 layers, and the model has 2 with experts"),
        ([[[0, 1], [2, 3]], [[0, 1], [2, 2]]], "layer 3 .* 2 devices with 4 experts; needed are"),
        ([[[0, 1], [2, 3]], [[0, 1, 2], [2, 3, 0]]], "layer 3 .* equally many in all layers"),
        ([[[0, 1, 2], [3]]] * 2, "layer 2 .* equally many"),
        ([[[0, 1, 2, 3]]] * 2, "1 devices with 4 experts; needed are --rollout-ep 2 devices"),
        ([[]] * 2, "0 devices with 0 experts"),
    ],
)
def test_maps_that_do_not_fit(layers: list[list[list[int]]], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_expert_map(write_map(tmp_path / "map.json", *layers), (2, 3), 4, 2)


def of_experts(*experts: object) -> str:
    """A map of one expert for each of two ranks, in one layer."""
    return json.dumps({"layer_list": [{"device_list": [{"device_expert": [e]} for e in experts]}]})


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"layer_list": [{"device_list": [{}]}]}', of_experts(0, 1.5), of_experts(0, "1"),
     None],
)  # fmt: skip
def test_files_that_are_no_maps(text: str | None, tmp_path: Path) -> None:
    """Or that are not there; numbers of experts are not rounded."""
    path = tmp_path / "map.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"--rollout-expert-map .*map\.json: not a map"):
        read_expert_map(path, (2,), 2, 2)


def test_flags_of_vllm_ascend_are_refused_elsewhere() -> None:
    layout = VllmLayout(spec_of(GQA), EngineLayout(1, 1))
    settings = partial(EngineSettings, "unused", layout, 0, "float32", 16, 1, 0, {})
    for flags in ({"rollout_graph_mode": "piecewise"}, {"rollout_chunked_prefill": "off"}):
        with pytest.raises(ValueError, match=r"vLLM-Ascend.*cpu"):
            HostBackend(settings(EngineTuningConfig(**flags)), CpuPlatform())
    foretold = EngineTuningConfig(rollout_graph_sizes=("auto",), rollout_graph_count=4)
    HostBackend(settings(foretold), CpuPlatform())


@pytest.mark.parametrize("before", [None, "uniform_random", ""])
def test_experts_are_random_for_engines_that_are_built_for_it(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's variable is as it was once the engine is built, so that no child inherits it."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    layout = VllmLayout(spec_of(MOE), EngineLayout(1, 1))
    settings = EngineSettings(
        "unused", layout, 0, "bfloat16", 16, 1, 0, {}, EngineTuningConfig(), force_balance=True
    )
    platform: Any = SimpleNamespace(name="cuda")
    backend = CudaBackend(settings, platform)
    assert os.environ.get(VARIABLE) == before
    with preserved_environment():  # as around every build
        backend.prepare()
        assert os.environ[VARIABLE] == "uniform_random"
    assert os.environ.get(VARIABLE) == before
