"""Our uses of other packages against a committed snapshot of their interfaces."""

from __future__ import annotations

import copy
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.architecture import PACKAGE
from support.ascend_api import PATH, snapshot
from support.ascend_api.entries import changed_defaults, difference, lookup, symbols
from support.ascend_api.sources import Sources
from support.ascend_api.uses import Use, problems, uses_of

# The packages of a CPU installation, which are read as they are installed.
INSTALLED = {"vllm 0.32.0": "vllm", "megatron-core 0.16.1": "megatron"}


@cache
def uses() -> tuple[Use, ...]:
    return tuple(uses_of(PACKAGE))


def planted() -> dict[str, Any]:
    return copy.deepcopy(snapshot())


def found(changed: dict[str, Any]) -> list[str]:
    return problems(uses(), changed["packages"]) + changed_defaults(changed, uses())


def test_every_use_of_ours_is_in_the_snapshot() -> None:
    """Names, members, positions and keywords of calls, parameters that patches were written for."""
    assert found(snapshot()) == [], "run python tests/support/ascend_api/update.py --write"
    assert len(uses()) > 150, "the walker sees our code"
    assert PATH.stat().st_size < 150 * 1024


def test_a_renamed_keyword_is_caught() -> None:
    changed = planted()
    entry = changed["packages"]["vllm 0.23.0"]["vllm:SamplingParams"]
    entry["parameters"] = entry["parameters"].replace("skip_clone=", "skip_copy=")
    (problem,) = found(changed)
    assert "vllm 0.23.0: vllm:SamplingParams takes no argument 'skip_clone'" in problem
    assert problem.startswith("rollout/vllm/requests.py:")
    lines = difference(snapshot(), changed)
    assert "vllm 0.23.0: vllm:SamplingParams: parameter skip_clone removed" in lines
    assert "vllm 0.23.0: vllm:SamplingParams: parameter skip_copy added" in lines


def test_a_removed_attribute_is_caught() -> None:
    changed = planted()
    key = "megatron.core:parallel_state.get_expert_data_parallel_group"
    del changed["packages"]["megatron-core 0.16.1"][key]
    problem = found(changed)[0]
    assert problem.endswith(f"megatron-core 0.16.1: {key} is not there")
    assert difference(snapshot(), changed) == [f"megatron-core 0.16.1: removed {key}"]


# Reached through arguments, by names in strings, or on objects that a run on CPU does not have.
REACHED = {
    "vllm-ascend 0.23.0": (
        "vllm_ascend.device_allocator.camem:create_and_map",
        "vllm_ascend.device_allocator.camem:unmap_and_release",
        "vllm_ascend.device_allocator.camem:memcpy",
        "vllm_ascend.device_allocator.camem:CaMemAllocator.get_instance",
        "vllm_ascend.worker.worker:NPUWorker.wake_up",
    ),
    "mindspeed core_r0.16.0": ("mindspeed.megatron_adaptor", "mindspeed.megatron_adaptor:repatch"),
    "torch_npu 2.10.0.post4": ("torch_npu.npu.memory:_set_allocator_settings",),
    "vllm 0.23.0": (
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.kv_caches",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.compilation_config",
        "vllm.config:CompilationConfig.static_forward_context",
    ),
}


@pytest.mark.parametrize(
    ("package", "key"), [(p, k) for p, keys in REACHED.items() for k in keys], ids=str
)
def test_what_no_name_in_the_source_tells_is_walked(package: str, key: str) -> None:
    """Each is a use of ours, is in the snapshot, and is missed when it goes."""
    changed = planted()
    del changed["packages"][package][key]
    assert any(problem.endswith(f"{package}: {key} is not there") for problem in found(changed))


def test_a_renamed_keyword_of_a_bound_method_is_caught() -> None:
    changed = planted()
    key = "vllm_ascend.worker.worker:NPUWorker.wake_up"
    changed["packages"]["vllm-ascend 0.23.0"][key]["parameters"] = "self, names=None"
    (problem,) = found(changed)
    assert problem.startswith("rollout/vllm_ascend/memory.py:")
    assert problem.endswith(f"{key} takes no argument 'tags'; it takes names")


def test_a_changed_default_is_caught() -> None:
    """Of a parameter that a call of ours leaves alone; others do not matter."""
    changed = planted()
    entry = changed["packages"]["vllm 0.32.0"]["vllm.inputs.engine:tokens_input"]
    assert "cache_salt=None" in entry["parameters"]
    entry["parameters"] = entry["parameters"].replace("cache_salt=None", "cache_salt=''")
    line = "vllm 0.32.0: vllm.inputs.engine:tokens_input: default of cache_salt was None, is ''"
    assert found(changed) == [line]
    assert difference(snapshot(), changed) == [line]


def test_changed_parameters_of_a_patched_function_are_caught() -> None:
    changed = planted()
    key = "vllm_ascend.worker.model_runner_v1:NPUModelRunner._sync_metadata_across_dp"
    changed["packages"]["vllm-ascend 0.23.0"][key]["parameters"] = "self, num_tokens"
    (problem,) = found(changed)
    assert f"{key} takes ('self', 'num_tokens'), patched for ('self', 'num_tokens', 'is" in problem


def test_a_key_of_another_version_is_told() -> None:
    changed = planted()
    changed["settings"]["0.23"]["additional_config"].remove("weight_nz_mode")
    assert difference(snapshot(), changed) == [
        "vllm-ascend 0.23: additional_config: removed weight_nz_mode"
    ]


@pytest.mark.slow
def test_the_snapshot_is_that_of_the_installed_packages() -> None:
    """Read anew from the installation of CPU runs: the same entries."""
    sources = {}
    for name, package in INSTALLED.items():
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        sources[name] = Sources(Path(next(iter(spec.submodule_search_locations))).parent, package)
    traced = {p: c for p, c in snapshot()["traced"].items() if p in sources}
    fresh, missing = symbols(uses(), traced, sources)
    assert missing == []
    for name in INSTALLED:
        assert fresh[name] == snapshot()["packages"][name]


def test_patches_of_mindspeed_find_their_targets() -> None:
    """In the installed megatron-core; those that are missing are of features that we refuse."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    megatron = Sources(Path(spec.origin).parents[2], "megatron")
    targets = snapshot()["patch_targets"]["megatron-core 0.16.1"]
    assert len(targets) > 200
    for target, there in targets.items():
        path = target.removeprefix("megatron.")
        assert (lookup(megatron, "megatron", path) is not None) is there, target
    missing = {target for target, there in targets.items() if not there}
    assert len(missing) < 20
    used = {f"{use.module}.{use.path}" for use in uses() if use.module.startswith("megatron")}
    assert not missing & used


SOURCE = """
from pkg.lazy import Thing, helper
from .base import *

class Base:
    kind: str = "b"
    def __init__(self, a, *, b=1): self.made = a
    def run(self, x, y=2): ...

class Child(Base):
    @property
    def size(self): ...
"""


@pytest.fixture
def small(tmp_path: Path) -> Sources:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text('_LAZY = {"Child": ".mod:Child"}')
    (tmp_path / "pkg" / "mod.py").write_text(SOURCE)
    (tmp_path / "pkg" / "base.py").write_text("if True:\n    def starred(q, *args, r=(1, 2)): ...")
    (tmp_path / "pkg" / "lazy.py").write_text("from pkg.base import starred as helper\nThing = 1")
    return Sources(tmp_path, "pkg")


def test_interfaces_are_read_through_imports_and_bases(small: Sources) -> None:
    child = small.symbol("pkg", "Child")
    assert child is not None and child.parameters == "self, a, *, b=1"
    assert child.members == {
        "kind": "='b'", "made": "", "__init__": "self, a, *, b=1", "run": "self, x, y=2",
        "size": "",
    }  # fmt: skip
    for module, name in (("pkg.mod", "helper"), ("pkg.mod", "starred"), ("pkg.lazy", "helper")):
        symbol = lookup(small, module, name)
        assert symbol is not None and symbol.parameters == "q, *args, r=..."
    assert lookup(small, "pkg", "mod.Child.run") is not None
    assert lookup(small, "pkg", "mod.Child.walk") is None
    assert lookup(small, "pkg.mod", "Thing") == lookup(small, "pkg", "lazy.Thing")
    assert lookup(small, "pkg", "mod") is not None and lookup(small, "pkg", "nothing") is None
