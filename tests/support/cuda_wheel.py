"""What vLLM's wheels for CUDA have that our code uses, without installing them.

usage: python tests/support/cuda_wheel.py vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl ...

A wheel comes by ``pip download --no-deps vllm==0.32.0``; it is read as an archive and not
imported. By release, the snapshot has digests of the modules that our code uses and of those that
decide what a GPU runs, compiled extensions, and what the wheel asks for. Where the digest of a
module equals that of the installed wheel for CPU (0.32.0), or of the sources beneath vllm-ascend
(0.23.0), every test of those sources holds for CUDA.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ascend.emulator.build import cache_folder  # noqa: E402
from support.architecture import PACKAGE  # noqa: E402
from support.ascend_api.uses import VLLM_CPU, uses_of  # noqa: E402

PATH = Path(__file__).with_name("cuda_wheel.json")
# Read by hand for the capability row of CUDA: memory, sleep, runner, graphs, experts, sampling,
# pauses, models that draft.
READ = (
    "vllm.config.compilation",
    "vllm.config.kernel",
    "vllm.config.model",
    "vllm.config.speculative",
    "vllm.config.vllm",
    "vllm.device_allocator",
    "vllm.device_allocator.cumem",
    "vllm.device_allocator.sleep_mode_backend",
    "vllm.engine.arg_utils",
    "vllm.envs",
    "vllm.model_executor.layers.fused_moe.oracle.unquantized",
    "vllm.platforms.cuda",
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.sched.request_queue",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.engine.core",
    "vllm.v1.engine.core_client",
    "vllm.v1.engine.output_processor",
    "vllm.v1.executor.abstract",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.request",
    "vllm.v1.sample.ops.topk_topp_sampler",
    "vllm.v1.spec_decode.eagle",
    "vllm.v1.spec_decode.llm_base_proposer",
    "vllm.v1.worker.block_table",
    "vllm.v1.worker.gpu_input_batch",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.utils",
)
OLDER = "0.23.0"  # the release for torch 2.11
# Asked for in the metadata; the rest is that of the wheel for CPU.
_ASKED = ("torch", "transformers", "flashinfer")


def used_modules() -> list[str]:
    """The modules of vLLM that our code uses on CPU and CUDA, and those that were read."""
    found = {use.module for use in uses_of(PACKAGE) if VLLM_CPU in use.packages}
    return sorted(name for name in {*found, *READ} if installed_file(name))


def installed_file(module: str) -> Path | None:
    """The source of a module of the installed wheel; nothing is imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations))).parent
    base = root.joinpath(*module.split("."))
    places = (base.with_name(base.name + ".py"), base / "__init__.py")
    return next((place for place in places if place.is_file()), None)


def older_file(module: str) -> Path:
    """A source of the older release as it is beneath vllm-ascend, where the emulator was built."""
    base = cache_folder().joinpath("vllm", *module.split("."))
    places = (base.with_name(base.name + ".py"), base / "__init__.py")
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        pytest.skip(f"vLLM {OLDER}'s sources are not there; tests/ascend fetches them")
    return found


def digest(source: bytes) -> str:
    """Of a source."""
    return hashlib.sha256(source).hexdigest()[:16]


@cache
def snapshot() -> dict[str, dict[str, Any]]:
    """What was found in the wheels, by their release."""
    found: dict[str, Any] = json.loads(PATH.read_text())
    return found


def read_wheel(file: Path) -> dict[str, Any]:
    """The snapshot of a wheel."""
    with zipfile.ZipFile(file) as wheel:
        names = wheel.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        lines = wheel.read(metadata).decode().splitlines()
        asked = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
        modules = {}
        for module in used_modules():
            base = module.replace(".", "/")
            found = [n for n in (f"{base}.py", f"{base}/__init__.py") if n in names]
            if found or release_of(file) != OLDER:  # which lacks some that later ones have
                modules[module] = digest(wheel.read(found[0]))
        return {
            "wheel": file.name,
            "requires": sorted(text for text in asked if text.startswith(_ASKED)),
            "extensions": sorted(name for name in names if name.endswith(".so")),
            "modules": modules,
        }


def release_of(file: Path) -> str:
    """By the name of a wheel."""
    return file.name.split("-")[1]


if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[1:]]
    record = snapshot() | {release_of(file): read_wheel(file) for file in files}
    PATH.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
