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


def test_what_is_not_there_is_not_found() -> None:
    vllm = installed("vllm")
    assert lookup(vllm, "vllm", "LLM.generate") is not None
    assert lookup(vllm, "vllm", "LLM.no_such_method") is None
    assert lookup(vllm, "vllm", "no_such_name") is None
