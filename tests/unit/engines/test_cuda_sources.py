"""The engine on CUDA against vLLM's sources: those of its wheels for CUDA, and what the CPU runs.

``support/cuda_wheel.py`` has digests of the wheels for CUDA. Where the installed wheel for CPU has
the same sources, what is tested here of it holds there. The older release, for torch 2.11, has the
sources that the emulator of NPUs runs, and with them the snapshot of their interfaces.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from support.ascend_api import snapshot as interfaces
from support.cuda_wheel import (
    OLDER,
    digest,
    installed_file,
    older_file,
    release_of,
    snapshot,
    used_modules,
)
from support.layout_cases import GQA, LATENT, MOE, spec_of

from mindspeed_rl.config import EngineTuningConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.core.patching import Patch
from mindspeed_rl.core.versions import pins, read_matrix
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.engines.vllm import capabilities
from mindspeed_rl.engines.vllm.arguments import host_arguments
from mindspeed_rl.engines.vllm.cuda_arguments import (
    RUNNER,
    check_cuda_graphs,
    check_runner,
)
from mindspeed_rl.engines.vllm.engine import VllmEngine, _fixed_options
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.vllm_patches import (
    draft_weights,
    seeded_draws,
    shared_memory_names,
    verified_drafts,
)

EAGER, GRAPHS = (EngineTuningConfig(rollout_graph_mode=m) for m in ("eager", "full-decode"))


def layout(case: Any = GQA, dp: int = 1) -> VllmLayout:
    return VllmLayout(spec_of(case), EngineLayout(dp, 1, dp=dp))


def arguments(
    case: Any = GQA, tuning: EngineTuningConfig = EAGER, **options: object
) -> dict[str, Any]:
    return host_arguments(options, layout(case), "cuda", tuning, (8, 16))


@pytest.mark.parametrize("module", used_modules())
def test_the_wheel_for_cuda_has_the_sources_that_tests_read(module: str) -> None:
    file = installed_file(module)
    assert file is not None
    assert digest(file.read_bytes()) == snapshot()[pins("cuda")["vllm"]]["modules"][module], (
        "a new use, or a new version: run python tests/support/cuda_wheel.py WHEEL"
    )


@pytest.mark.parametrize("module", snapshot()[OLDER]["modules"])
def test_the_older_wheel_has_the_sources_beneath_vllm_ascend(module: str) -> None:
    assert digest(older_file(module).read_bytes()) == snapshot()[OLDER]["modules"][module]


@pytest.mark.parametrize(
    ("section", "torch", "versions"),
    [
        ("cuda", "2.13.0", ("5.16.0", "5.16.1", "5.19.9", "5.20.0")),
        ("cuda-torch211", "2.11.0", ("5.5.0", "5.5.4", "5.19.9")),
    ],
)
def test_the_wheels_belong_to_the_matrix(
    section: str, torch: str, versions: tuple[str, ...]
) -> None:
    rows = read_matrix()[section]
    release = rows["vllm"].removeprefix("==")
    found = snapshot()[release]
    assert release_of(Path(found["wheel"])) == release
    asked = {need.name: need.specifier for need in map(Requirement, found["requires"])}
    assert str(asked["torch"]) == f"=={torch}" and SpecifierSet(rows["torch"]).contains(torch)
    for version in versions:
        allowed = SpecifierSet(rows["transformers"]).contains(version)
        assert allowed == asked["transformers"].contains(version)
    assert "vllm/cumem_allocator.abi3.so" in found["extensions"], "the pool of sleep mode"


@pytest.mark.parametrize(
    ("platform", "installed", "expected"),
    [("cuda", "0.32.1", True), ("cuda", OLDER, False), ("cpu", "0.32.0", True),
     ("npu", "0.23.0", False)],
)  # fmt: skip
def test_requests_pause_where_the_scheduler_is_the_one_that_was_read(
    platform: str, installed: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "version", lambda name: installed)
    assert capabilities.can_pause(platform) is expected


def test_steps_that_pad_or_idle_write_into_no_block_of_a_paused_request() -> None:
    """What is sent to the device of a request, and where padding goes, by the sources."""
    worker = "vllm.v1.worker."
    (runner, table) = (
        cast(Path, installed_file(worker + name)).read_text()
        for name in ("gpu_model_runner", "block_table")
    )

    def function(source: str, name: str) -> str:
        nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
        return ast.unparse(next(n for n in nodes if n.name == name))

    dummy = function(runner, "_dummy_run")
    assert dummy.index("_get_slot_mappings(") < dummy.index("sm.fill_(-1)") < dummy.index("model(")
    padding = "tl.store(slot_mapping_ptr + offsets, PAD_ID, mask=offsets < max_num_tokens)"
    assert padding in function(table, "kernel")
    prepared = function(runner, "_prepare_inputs")
    assert "self.input_batch.block_table.commit_block_table(num_reqs)" in prepared


def test_vllm_knows_every_argument() -> None:
    from dataclasses import fields
    from typing import get_args

    from vllm.config import CompilationConfig
    from vllm.config.compilation import CompilationMode, CUDAGraphMode
    from vllm.config.kernel import MoEBackend
    from vllm.engine.arg_utils import EngineArgs

    settings = SimpleNamespace(
        dtype="bfloat16", kv_cache_bytes=1, max_model_len=8, seed=0, layout=layout(),
        trust_remote_code=False, scores_entropy=False, draft_rule=None,
    )  # fmt: skip
    everything = _fixed_options(cast(Any, settings)) | arguments(MOE, GRAPHS)
    known = {field.name for field in fields(EngineArgs)} | {"skip_tokenizer_init"}
    assert set(everything) <= known
    assert everything["moe_backend"] in get_args(MoEBackend)
    graphs = everything["compilation_config"]
    made = CompilationConfig(**graphs)
    assert made.mode == CompilationMode.NONE, "models are not compiled"
    assert made.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    assert not made.cudagraph_mode.requires_piecewise_compilation()
    assert made.cudagraph_capture_sizes == [8, 16]


def test_the_older_release_knows_every_argument() -> None:
    """Of models without experts, which alone it runs here."""
    settings = SimpleNamespace(
        dtype="bfloat16", kv_cache_bytes=1, max_model_len=8, seed=0, layout=layout(),
        trust_remote_code=False, scores_entropy=True, draft_rule=None,
    )  # fmt: skip
    everything = _fixed_options(cast(Any, settings)) | arguments(GQA, GRAPHS)
    known = interfaces()["settings"]
    assert set(everything) <= {*known["EngineArgs"], "skip_tokenizer_init"}
    assert set(everything["compilation_config"]) <= set(known["CompilationConfig"])


def older_function(module: str, name: str, **names: object) -> Callable[..., Any]:
    """A function of the older release by itself, with the names that it reads."""
    tree = ast.parse(older_file(module).read_text())
    (node,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    node.decorator_list, node.returns = [], None
    for argument in node.args.args:
        argument.annotation = None
    exec(compile(ast.Module([node], []), module, "exec"), names)
    return cast(Callable[..., Any], names[name])


@pytest.mark.parametrize(
    "patch",
    [seeded_draws._RUNNER, seeded_draws._SAMPLER, verified_drafts._PATCH, draft_weights._PATCH],
    ids=lambda patch: patch.target.rpartition(":")[2],
)
def test_the_patches_of_sampling_fit_the_older_release(patch: Patch) -> None:
    """What is patched on CUDA; the parameters of the newer release are compared as it is used."""
    module, _, path = patch.target.partition(":")
    tree: Any = ast.parse(older_file(module).read_text())
    for name in path.split("."):
        (tree,) = (n for n in tree.body if getattr(n, "name", "") == name)
    assert tuple(argument.arg for argument in tree.args.args) == patch.parameters


def test_the_older_release_obeys_the_choice_of_the_runner() -> None:
    chosen = older_function(
        "vllm.config.vllm", "use_v2_model_runner",
        envs=SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=False),
    )  # fmt: skip
    assert chosen(SimpleNamespace()) is False


def test_the_older_release_starts_beside_the_trainer() -> None:
    """Its check of free memory, with the share that is asked for; 1 GiB of 80 is left."""
    check = older_function(
        "vllm.v1.worker.utils", "request_memory", math=math, format_gib=lambda n: f"{n / 2**30}"
    )
    free = SimpleNamespace(total_memory=80 * 2**30, free_memory=2**30, device_="cuda:0")
    assert check(free, SimpleNamespace(gpu_memory_utilization=0.01)) < 2**30
    with pytest.raises(ValueError, match="Free memory on device"):
        check(free, SimpleNamespace(gpu_memory_utilization=0.92))


def test_graphs_are_captured_where_they_are_asked_for() -> None:
    assert arguments()["enforce_eager"] and "compilation_config" not in arguments()
    assert not arguments(tuning=GRAPHS)["enforce_eager"]
    assert all(arguments(tuning=tuning)["enable_sleep_mode"] for tuning in (EAGER, GRAPHS))
    with pytest.raises(UsageError, match="enforce-eager: use --rollout-graph-mode"):
        arguments(enforce_eager=False)
    with pytest.raises(UsageError, match=r"--vllm-moe-backend: .* 'triton'"):
        arguments(MOE, moe_backend="flashinfer_cutlass")


@pytest.mark.parametrize(
    ("case", "dp", "mode", "told"),
    [
        (GQA, 1, "piecewise", "has compiled"),
        (GQA, 1, "full-and-piecewise", "has compiled"),
        (LATENT, 1, "full-decode", "in other memory than a graph reads"),
        (MOE, 2, "full-decode", "--rollout-dp 2"),
    ],
)
def test_graphs_that_would_be_wrong_are_refused(case: Any, dp: int, mode: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_cuda_graphs(EngineTuningConfig(rollout_graph_mode=mode), layout(case, dp))
    for harmless in ("auto", "eager"):
        check_cuda_graphs(EngineTuningConfig(rollout_graph_mode=harmless), layout(case, dp))


def test_the_runner_is_chosen_and_vllm_obeys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own choice beside Triton is version 2; of the wheels only that for CUDA brings Triton."""
    import vllm.config.vllm as vllm_config

    assert engine_provider().environment("cuda", 0)[RUNNER] == "0"
    chosen: Any = vllm_config.VllmConfig.use_v2_model_runner
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        _get_v2_model_runner_unsupported_features=list,
    )
    monkeypatch.setattr(vllm_config, "HAS_TRITON", True)
    monkeypatch.delenv(RUNNER, raising=False)
    assert chosen.fget(config), "why it has to be chosen"
    monkeypatch.setenv(RUNNER, "0")
    assert not chosen.fget(config)
    check_runner({RUNNER: "0"})
    check_runner({})
    with pytest.raises(UsageError, match=f"unset {RUNNER}"):
        check_runner({RUNNER: "1"})


def test_the_memory_check_at_the_start_is_passed_beside_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device of 80 GiB, of which the trainer leaves 1: vLLM's own function decides."""
    import vllm
    from vllm.v1.worker.utils import request_memory

    share = _fixed_options(
        cast(Any, SimpleNamespace(
            dtype="bfloat16", kv_cache_bytes=1, max_model_len=8, seed=0, layout=layout(),
            trust_remote_code=False, scores_entropy=False, draft_rule=None,
        ))
    )["gpu_memory_utilization"]  # fmt: skip
    cache = cast(Any, SimpleNamespace(gpu_memory_utilization=share))

    def device(free: float) -> Any:
        return SimpleNamespace(
            total_memory=80 * 2**30, free_memory=int(free * 2**30), device_="cuda:0"
        )

    assert request_memory(device(1.0), cache) < 2**30
    engine = VllmEngine.__new__(VllmEngine)
    engine._layout = layout()

    def refuses(*_: object, **__: object) -> None:
        request_memory(device(0.5), cache)

    monkeypatch.setattr(shared_memory_names, "own", lambda: None)  # needs other ranks
    monkeypatch.setattr(vllm, "LLM", refuses)
    with pytest.raises(UsageError, match=r"does not fit on the device: .*0\.5.*--rl-offload all"):
        engine._build("model", {})


@pytest.mark.parametrize("find", [installed_file, older_file])
def test_the_worker_puts_weights_and_cache_into_the_pool(
    find: Callable[[str], Path | None],
) -> None:
    """By the tags that are freed; a renamed tag is mapped by nobody else while it is mapped."""
    from vllm.device_allocator import DEFERRABLE_TAGS

    assert set(DEFERRABLE_TAGS) == {"weights", "kv_cache"}
    file = find("vllm.v1.worker.gpu_worker")
    assert file is not None
    calls = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and "_maybe_get_memory_pool_context" in ast.unparse(node.func)
    ]
    for tag in DEFERRABLE_TAGS:
        assert any(f"'{tag}'" in call for call in calls)


def test_vllm_swaps_the_halves_of_experts_for_other_kernels_than_the_pinned_one() -> None:
    """``w13`` in the order up, gate is FlashInfer's CUTLASS; Triton's branch changes no weight."""
    file = installed_file("vllm.model_executor.layers.fused_moe.oracle.unquantized")
    assert file is not None
    convert = next(
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and "convert" in node.name
    )
    tests = [ast.unparse(node.test) for node in ast.walk(convert) if isinstance(node, ast.If)]
    assert any("FLASHINFER_CUTLASS" in test for test in tests)
    assert not any(test.endswith("UnquantizedMoeBackend.TRITON") for test in tests)
