"""Our uses of other packages against their interfaces: names, members, parameters.

Of packages of an NPU installation there is a committed snapshot; those of a CPU installation are
read as they are installed.
"""

from __future__ import annotations

import copy
import importlib.util
from functools import cache
from pathlib import Path

import pytest
from support.architecture import PACKAGE
from support.ascend_api import PATH, snapshot
from support.ascend_api.sources import Sources, interface, lookup
from support.ascend_api.uses import Use, problems, uses_of

VLLM, ASCEND = "vllm 0.23.0", "vllm-ascend 0.23.0"
MEGATRON = "megatron-core 0.16.1"


@cache
def uses() -> tuple[Use, ...]:
    return tuple(uses_of(PACKAGE))


@cache
def installed(package: str) -> Sources:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Sources(Path(next(iter(spec.submodule_search_locations))).parent, package)


def test_every_use_is_in_the_snapshot() -> None:
    """Names, members, positions and keywords of calls, parameters that patches were written for."""
    found = problems(uses(), snapshot()["packages"])
    assert found == [], "run python tests/support/ascend_api/update.py"
    assert len(uses()) > 150, "the walker sees our code"
    assert PATH.stat().st_size < 150 * 1024


@pytest.mark.parametrize(("name", "package"), [("vllm 0.32.0", "vllm"), (MEGATRON, "megatron")])
def test_every_use_is_in_the_installed_package(name: str, package: str) -> None:
    keys = [use.key for use in uses() if name in use.packages]
    assert len(keys) > 30
    assert problems(uses(), {name: interface(keys, installed(package))}) == []


CAMEM, WORKER = "vllm_ascend.device_allocator.camem", "vllm_ascend.worker.worker:NPUWorker"
SYNC = "vllm_ascend.worker.model_runner_v1:NPUModelRunner._sync_metadata_across_dp"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
# Reached through arguments, by names in strings, or on objects that no run on CPU has.
HARD_TO_SEE = {
    *(f"{CAMEM}:{name}" for name in ("create_and_map", "unmap_and_release", "memcpy")),
    *(f"{CAMEM}:CaMemAllocator.get_instance", f"{WORKER}.wake_up"),
    *("mindspeed.megatron_adaptor", "mindspeed.megatron_adaptor:repatch"),
    "torch_npu.npu.memory:_set_allocator_settings",
    *(f"{RUNNER}.kv_caches", f"{RUNNER}.compilation_config"),
    "vllm.config:CompilationConfig.static_forward_context",
}


def test_uses_that_are_hard_to_see_are_found() -> None:
    assert {use.key for use in uses()} >= HARD_TO_SEE


# A name that goes, or a function whose parameters change, as one string is replaced by another.
FAULTS = [
    (VLLM, "vllm:SamplingParams", ("skip_clone=", "skip_copy="), "argument 'skip_clone'"),
    (ASCEND, f"{WORKER}.wake_up", ("tags=", "names="), "argument 'tags'"),
    (ASCEND, SYNC, (", is_draft_model=False", ""), "patched for ('self', 'num_tokens', 'is"),
    (ASCEND, f"{CAMEM}:memcpy", None, "is not there"),
]


@pytest.mark.parametrize(("package", "key", "change", "told"), FAULTS)
def test_a_changed_interface_is_told(
    package: str, key: str, change: tuple[str, str] | None, told: str
) -> None:
    changed = copy.deepcopy(snapshot()["packages"])
    if change is None:
        del changed[package][key]
    else:
        assert change[0] in changed[package][key]
        changed[package][key] = changed[package][key].replace(*change)
    found = problems(uses(), changed)
    assert found and all(f"{package}: {key}" in problem for problem in found)
    assert any(told in problem for problem in found), found


def test_patches_of_mindspeed_find_their_targets() -> None:
    """In the installed megatron-core; those that are missing are of features that we refuse."""
    targets = snapshot()["patch_targets"]
    assert len(targets) > 200
    megatron = installed("megatron")
    missing = {t for t in targets if not lookup(megatron, "megatron", t.partition(".")[2])}
    assert len(missing) < 20
    assert not missing & {use.key.replace(":", ".") for use in uses()}


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
        "kind": None, "made": None, "__init__": "self, a, *, b=1", "run": "self, x, y=2",
        "size": None,
    }  # fmt: skip
    for module, name in (("pkg.mod", "helper"), ("pkg.mod", "starred"), ("pkg.lazy", "helper")):
        symbol = lookup(small, module, name)
        assert symbol is not None and symbol.parameters == "q, *args, r=..."
    assert lookup(small, "pkg", "mod.Child.run") is not None
    assert lookup(small, "pkg", "mod.Child.walk") is None
    assert lookup(small, "pkg.mod", "Thing") == lookup(small, "pkg", "lazy.Thing")
    assert lookup(small, "pkg", "mod") is not None and lookup(small, "pkg", "nothing") is None
