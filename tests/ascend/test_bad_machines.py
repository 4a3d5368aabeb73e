"""A machine on which a run cannot work: one line from the start of a run, whatever is wrong.

Each case is an entry in a process of its own, with the real torch_npu. What is wrong is told by
files, by a program ``npu-smi``, or by the codes of CANN and its driver.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from make_tiny_model import write_tiny_model
from support.jobs import free_port

pytestmark = [pytest.mark.ascend_emul, pytest.mark.slow]

SMI = """
+-------------------+-----------+--------------------------------------------+
| NPU   Name        | Health    | Power(W) Temp(C)     Hugepages-Usage(page) |
| Chip  Phy-ID      | Bus-Id    | AICore(%) Memory-Usage(MB) HBM-Usage(MB)   |
+===================+===========+============================================+
| 2     Ascend910   | OK        | 178.5   36           0    / 0              |
| 0     4           | 0000:9D:0 | 0       0 / 0        3416 / 65536          |
| 2     Ascend910   | OK        | -       36           0    / 0              |
| 1     5           | 0000:9F:0 | 0       0 / 0        30195/ 65536          |
+-------------------+-----------+--------------------------------------------+
| NPU     Chip      | Process id | Process name | Process memory(MB)         |
+===================+============+==============+============================+
| 2       0         | 41         | python       | 132                        |
| 2       1         | 41         | VLLMWorker   | 27001                      |
"""
HELD = "dcmi model initialized failed, because the device is used. ret is -8020\n"
OVERRIDES = ("MINDSPEED_RL_ALLOW_VERSIONS", "MINDSPEED_RL_ALLOW_SHARED_DEVICES")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("job")
    (folder / "rows.jsonl").write_text('{"prompt": "1", "response": "2"}\n')
    model = write_tiny_model(folder / "model")
    return f"--platform npu --sft-data {folder}/rows.jsonl --hf-checkpoint {model}".split()


def npu_smi(folder: Path, output: str) -> dict[str, str]:
    """An environment in which the program of this name prints the output."""
    (folder / "output").write_text(output)
    program = folder / "npu-smi"
    program.write_text(f"#!/bin/sh\ncat {folder}/output\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def start(flags: list[str], **changes: str) -> subprocess.CompletedProcess[str]:
    """The entry as one rank of one; by default any version may run."""
    variables = {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    environ = {k: v for k, v in os.environ.items() if k not in OVERRIDES}
    changes = {"MINDSPEED_RL_ALLOW_VERSIONS": "1"} | changes
    training = ["--train-iters", "1", "--global-batch-size", "4"]
    return subprocess.run(
        [sys.executable, "-m", "mindspeed_rl.pretrain", *flags, *training],
        env=environ | variables | changes, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def line_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that it printed as an error."""
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    (line,) = re.findall(r"^mindspeed_rl\.pretrain: error: .*", done.stderr, re.M)
    return str(line)


def test_wrong_packages_are_named_before_torch_is_imported(flags: list[str]) -> None:
    """The emulator has the torch of CPU runs, and with it another torch_npu."""
    line = line_of(start(flags, MINDSPEED_RL_ALLOW_VERSIONS=""))
    for name in ("torch", "torch_npu"):
        assert re.search(rf"{name} 2\.13\.0\S*, ==2\.10\.0\S* is needed \(pip install", line), line
    assert "MINDSPEED_RL_ALLOW_VERSIONS=1" in line


def test_another_cann_is_named(flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "aarch64-linux" / "ascend_toolkit_install.info"
    file.parent.mkdir()
    file.write_text("package_name=Ascend-cann-toolkit\nversion=8.5.0\ninnerversion=V100\n")
    home = {"ASCEND_TOOLKIT_HOME": str(tmp_path)}
    line = line_of(start(flags, MINDSPEED_RL_ALLOW_VERSIONS="", **home))
    assert "CANN 8.5.0, 9.1.0 is needed" in line and "set_env.sh" in line


def test_a_torch_npu_that_does_not_load_is_no_traceback(flags: list[str], tmp_path: Path) -> None:
    """As without CANN's libraries: the environment of its set_env.sh is what finds them."""
    line = line_of(start(flags, LD_LIBRARY_PATH=str(tmp_path)))
    assert "torch_npu does not load: " in line and ".so" in line and "set_env.sh" in line


VISIBLE = [
    ("", "0 devices", "ASCEND_RT_VISIBLE_DEVICES=;"), ("12", "0 devices", "=12;"),
    ("1,0", "1 ranks", "ascending"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "what", "also"), VISIBLE)
def test_visible_devices_that_are_not_there(
    flags: list[str], given: str, what: str, also: str
) -> None:
    line = line_of(start(flags, ASCEND_RT_VISIBLE_DEVICES=given))
    assert what in line and also in line


def test_fewer_devices_than_ranks(flags: list[str]) -> None:
    line = line_of(start(flags, EMULATED_NPU_DEVICES="3", LOCAL_WORLD_SIZE="4", WORLD_SIZE="4"))
    assert "4 ranks on this node, and CANN sees 3 devices" in line and "--nproc-per-node 3" in line


def test_no_device_at_all(flags: list[str]) -> None:
    line = line_of(start(flags, EMULATED_NPU_DEVICES="0"))
    assert "/dev/davinci" in line and "--device" in line


def test_devices_of_another_container(flags: list[str], tmp_path: Path) -> None:
    by_driver = line_of(start(flags, EMULATED_NPU_DRIVER_CODE="87"))
    by_smi = line_of(start(flags, EMULATED_NPU_DEVICES="0", **npu_smi(tmp_path, HELD)))
    for line in (by_driver, by_smi):
        assert "held by another container" in line and "npu-smi info" in line


def test_a_device_that_does_not_start(flags: list[str]) -> None:
    line = line_of(start(flags, EMULATED_NPU_SET_DEVICE_CODE="507033"))
    assert "device 0: the device does not start" in line and "507033" in line


def test_a_device_in_use_is_refused_with_the_process_that_uses_it(
    flags: list[str], tmp_path: Path
) -> None:
    taken = {"EMULATED_NPU_TAKEN_MIB": "26779", **npu_smi(tmp_path, SMI)}
    line = line_of(start(flags, ASCEND_RT_VISIBLE_DEVICES="1", **taken))
    assert "device 1 is in use: 26.2 GiB" in line and "process 41 (VLLMWorker)" in line
    shared = start(flags, MINDSPEED_RL_ALLOW_SHARED_DEVICES="1", **taken)
    assert "in use" not in shared.stderr
    assert "in use" not in start(flags, EMULATED_NPU_TAKEN_MIB="2048").stderr, "siblings' contexts"
