"""What a machine with GPUs is refused for, in one line each, with stand-ins for torch's answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.installed import ALLOW_SHARED_DEVICES
from mindspeed_rl.core.versions import read_matrix
from mindspeed_rl.diagnosis.devices import device_rows
from mindspeed_rl.diagnosis.facts import Facts, gather
from mindspeed_rl.diagnosis.rows import Status
from mindspeed_rl.launch import machine
from mindspeed_rl.platforms import registry
from mindspeed_rl.platforms.accelerator import AcceleratorPlatform
from mindspeed_rl.platforms.cuda import CudaPlatform

GIB = 2**30
OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU "
    "driver by downloading and installing a new version from the URL: http://www.nvidia.com"
)
NONE = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"


def raising(text: str) -> Any:
    def init() -> None:
        raise RuntimeError(text)

    return init


@pytest.mark.parametrize(
    ("build", "init", "told"),
    [
        (None, print, r"is a build without CUDA; pip install --force-reinstall 'torch=="),
        ("13.0", raising(OLD), r"too old \(found version 12020\); update the driver, or install "
         "a torch built for less than CUDA 13.0"),
        ("13.0", raising(NONE), r"Found no NVIDIA driver on your system; .*--gpus all"),
        ("13.0", print, "CUDA_VISIBLE_DEVICES chooses"),
    ],
)  # fmt: skip
def test_a_torch_that_sees_no_gpu_says_why(
    build: str | None, init: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(registry, "_CURRENT", [])
    with pytest.raises(UsageError, match=told) as caught:
        registry.select_platform("cuda")
    assert str(caught.value).startswith("--platform cuda: torch 2.") and "\n" not in str(
        caught.value
    )


def gpu(*, taken: float = 0.4, set_device: Any = print) -> AcceleratorPlatform:
    """A device of 80 GiB."""
    api = SimpleNamespace(
        set_device=set_device,
        mem_get_info=lambda device: (int((80 - taken) * GIB), 80 * GIB),
    )
    platform: Any = AcceleratorPlatform("cuda", api)
    platform.name = CudaPlatform.name
    return platform  # type: ignore[no-any-return]


def test_a_second_job_on_a_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_SHARED_DEVICES, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setenv("LOCAL_RANK", "1")
    machine.bind_device(gpu())
    with pytest.raises(UsageError) as caught:
        machine.bind_device(gpu(taken=30.5))
    assert str(caught.value) == (
        "device 7 is in use: 30.5 GiB are taken before this run, by processes that nvidia-smi on "
        "the host may name; end them, or choose others with CUDA_VISIBLE_DEVICES; to share it, "
        f"export {ALLOW_SHARED_DEVICES}=1"
    )
    monkeypatch.setenv(ALLOW_SHARED_DEVICES, "1")
    machine.bind_device(gpu(taken=30.5))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("CUDA error: invalid device ordinal\nGPU device may be out of range",
         r"device 3: no such device \(CUDA error: invalid device ordinal\); start no more ranks "
         "than devices on a node, or change CUDA_VISIBLE_DEVICES"),
        ("CUDA error: uncorrectable ECC error encountered",
         r"device 3: it cannot be opened \(.*ECC.*\); nvidia-smi shows its state"),
    ],
)  # fmt: skip
def test_a_device_that_cannot_be_opened_is_told(
    said: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")

    def refuses(device: object) -> None:
        raise RuntimeError(said)

    with pytest.raises(UsageError, match=told):
        machine.bind_device(gpu(set_device=refuses))


@pytest.mark.parametrize(
    ("line", "version", "fits"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 17", "535.161.08",
         False),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
         "580.65.06", True),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  590.12  Release", "590.12",
         True),
    ],
)  # fmt: skip
def test_the_doctor_reads_the_driver(line: str, version: str, fits: bool, tmp_path: Path) -> None:
    file = tmp_path / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text(f"{line}\nGCC version: gcc 13\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    facts = gather("cuda", {}, root=tmp_path)
    assert facts.driver == version
    rows = list(device_rows(facts, "cuda", read_matrix()))
    red = [row.what for row in rows if row.status is Status.RED]
    assert red == ([] if fits else ["NVIDIA driver 535.161.08, 580.65.06 or later is needed"])


@pytest.mark.parametrize(
    ("name", "devices", "build", "noted"),
    [
        ("auto", ("/dev/nvidia0",), "2.13.0+cpu", True),
        ("auto", ("/dev/nvidia0",), "2.13.0+cu130", False),
        ("auto", (), "2.13.0+cpu", False),
        ("cpu", ("/dev/nvidia0",), "2.13.0+cpu", False),
    ],
)
def test_gpus_that_a_cpu_build_leaves_unused_are_noted(
    name: str, devices: tuple[str, ...], build: str, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "device_nodes", lambda platform: devices)
    monkeypatch.setattr(machine, "gather", lambda *_, **__: Facts(packages={"torch": build}))
    found = machine.unused_devices(name)
    assert bool(found) == noted
    assert not noted or "torch 2.13.0+cpu is a build without CUDA" in found[0]
