"""The doctor: every red row from faked facts, with its fix, and none without cause."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from mindspeed_rl.core import versions
from mindspeed_rl.diagnosis.devices import device_rows
from mindspeed_rl.diagnosis.environment import environment_rows, port_set
from mindspeed_rl.diagnosis.facts import Facts, checkout, gather
from mindspeed_rl.diagnosis.npu_smi import DeviceProcess, held_elsewhere, processes_of, soc_of
from mindspeed_rl.diagnosis.packages import package_rows
from mindspeed_rl.diagnosis.rows import DoctorRow, Status, green, lines, red, verdict
from mindspeed_rl.launch import bootstrap

ROOT = Path(__file__).resolve().parents[3]
MATRIX = versions.read_matrix()
SHM = 16 * 2**30


def as_pinned(platform: str) -> dict[str, str]:
    """A set of packages that the matrix allows."""
    found = {}
    for section in ("core", platform, f"{platform}.no-deps"):
        for name, specifier in MATRIX.get(section, {}).items():
            first = specifier.split(",")[0]
            version = first[2:].removesuffix(".*") if first.startswith(("==", ">=")) else "1.0"
            found[canonicalize_name(name)] = version
    return found


def healthy(platform: str) -> Facts:
    """A machine on which nothing is red."""
    environ = {
        "ASCEND_TOOLKIT_HOME": "/cann", "ATB_HOME_PATH": "/atb", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "6000", "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    bootstrap.set_defaults(platform, environ)
    return Facts(
        python=(3, 11),
        packages=as_pinned(platform),
        places={
            "megatron.core": "/site-packages/megatron/core/__init__.py",
            "mindspeed": "/m",
        },
        megatron_roots=("/site-packages",),
        environ=environ,
        interfaces=frozenset({"lo", "eth0"}),
        devices=("/dev/a0", "/dev/a1"),
        driver="580.65.06" if platform == "cuda" else "26.0.rc1",
        cann="9.1.0",
        soc="a3",
        engine_soc="A3",
        mindspeed_version=versions.mindspeed_branch().partition("_r")[2],
        shm_bytes=SHM,
    )


def rows_of(
    facts: Facts, platform: str, *, phase_s: float = 1800, nodes: bool = True
) -> list[DoctorRow]:
    return [
        *package_rows(facts, platform, MATRIX),
        *environment_rows(facts, platform, longest_phase_s=phase_s, several_nodes=nodes),
        *device_rows(facts, platform, MATRIX),
    ]


def reds(rows: list[DoctorRow]) -> list[DoctorRow]:
    return [row for row in rows if row.status is Status.RED]


def with_environ(facts: Facts, changes: Mapping[str, str | None]) -> Facts:
    changed = {k: v for k, v in (dict(facts.environ) | dict(changes)).items() if v is not None}
    return replace(facts, environ=changed)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "npu"])
def test_a_machine_as_the_matrix_says_has_no_red_row(platform: str) -> None:
    rows = rows_of(healthy(platform), platform)
    assert not reds(rows)
    assert {row.area for row in rows} == {"packages", "environment", "devices"}
    assert any("as versions.cfg says" in row.what for row in rows)


# package -> what is installed instead, on which platform, and a word of the fix
WRONG_PACKAGES = [
    ("torch", "2.9.0", "npu", "pip install 'torch==2.10.0'"),
    ("torch-npu", None, "npu", "pip install 'torch_npu==2.10.0.post4'"),
    ("vllm", "0.22.0", "npu", "VLLM_TARGET_DEVICE=empty"),
    ("megatron-core", "0.12.1", "cuda", "megatron-core==0.16.1"),
    ("vllm", None, "cuda", "pip install 'vllm==0.32.0'"),
    ("numpy", "2.4.1", "cpu", "setup_env.sh"),
    ("safetensors", None, "cpu", "setup_env.sh"),
    ("torch", "2.10.0+cu128", "npu", "--force-reinstall"),
    ("torch", "2.13.0+cpu", "cuda", "--force-reinstall"),
]


def with_package(facts: Facts, name: str, version: str | None) -> Facts:
    others = {k: v for k, v in facts.packages.items() if k != name}
    return replace(facts, packages=others | ({name: version} if version else {}))


def test_local_builds_of_a_pinned_version_fit() -> None:
    facts = healthy("npu")
    built = {**facts.packages, "vllm": "0.23.0+empty", "torch": "2.10.0+cpu"}
    assert not reds(rows_of(replace(facts, packages=built), "npu"))


FACTS_THAT_ARE_RED = [
    ("npu", {"python": (3, 10)}, "python 3.10", "PYTHON="),
    ("npu", {"foreign": ("/x/mindspeed_rl",)}, "/x/mindspeed_rl", "PYTHONPATH"),
    ("npu", {"places": {"megatron.core": "/src/Megatron-LM/megatron/core"}}, "comes from /src",
     "PYTHONPATH"),
    ("npu", {"engine_soc": "A2"}, "built for A2, this machine is an A3", "SOC_VERSION"),
    ("npu", {"mindspeed_version": "0.15.3"}, "MindSpeed version 0.15.3 in /m, branch core_r0.16.0",
     "git switch core_r0.16.0"),
    ("npu", {"cann": ""}, "CANN: no version", "toolkit"),
    ("npu", {"cann": "8.5.0"}, "CANN 8.5.0", "toolkit"),
    ("npu", {"driver": "25.5.0"}, "25.5.0", "firmware"),
    ("npu", {"driver": ""}, "driver (HDK): no version", "firmware"),
    ("npu", {"driver": "25.0.rc1.1"}, "26.0.rc1 or later", "firmware"),
    ("npu", {"held": True}, "held by another container", "npu-smi"),
    ("npu", {"processes": (DeviceProcess(1, 0, 1, 77, "python", 5175),)},
     "device 1 (NPU 0, chip 1) is in use: process 77 (python) holds 5175 MiB",
     "MINDSPEED_RL_ALLOW_SHARED_DEVICES=1"),
    ("npu", {"devices": ()}, "/dev/davinci", "--device"),
    ("cuda", {"devices": ()}, "/dev/nvidia", "--gpus"),
    ("cuda", {"driver": "535.161.08"}, "NVIDIA driver 535.161.08", "update it"),
    ("cuda", {"devices": ("/dev/nvidia0",)}, "2 ranks on this node and 1 devices",
     "--nproc-per-node 1"),
    ("cpu", {"shm_bytes": 64 * 2**20}, "64 MiB", "--shm-size"),
    ("npu", {"ports": frozenset({60003})}, "60003", "HCCL_IF_BASE_PORT"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("branch", "version", "status"),
    [
        ("core_r0.16.0", "", Status.GREEN), ("my-fix", "0.16.0", Status.GREEN),
        ("core_r0.15.3", "", Status.RED), ("master", "0.12.1", Status.RED),
        ("my-fix", "", Status.NOTE), ("", "", Status.NOTE),
    ],
)  # fmt: skip
def test_mindspeed_is_known_by_its_branch_or_version(
    branch: str, version: str, status: Status
) -> None:
    facts = replace(healthy("npu"), mindspeed_branch=branch, mindspeed_version=version)
    (row,) = [row for row in rows_of(facts, "npu") if "MindSpeed" in row.what]
    assert row.status is status and "core_r0.16.0" in row.what + row.fix


def test_branch_and_version_of_a_checkout(tmp_path: Path) -> None:
    package = tmp_path / "mindspeed" / "__init__.py"
    assert checkout("") == checkout(str(package)) == ("", "")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text("ref: refs/heads/core_r0.16.0\n")
    (tmp_path / "setup.py").write_text("import os\n\n__version__ = '0.16.0'\n")
    assert checkout(str(package)) == checkout(str(package.parent)) == ("core_r0.16.0", "0.16.0")
    (tmp_path / ".git/HEAD").write_text("0123456789abcdef\n")
    assert checkout(str(package)) == ("", "0.16.0")


# variables, what the row says, what the fix says
ENVIRONMENTS_THAT_ARE_RED = [
    ("npu", {"HCCL_CONNECT_TIMEOUT": "120"}, "HCCL_CONNECT_TIMEOUT=120",
     "export HCCL_CONNECT_TIMEOUT=600"),
    ("npu", {"HCCL_CONNECT_TIMEOUT": None}, "not set", "export HCCL_CONNECT_TIMEOUT=600"),
    ("npu", {"HCCL_EXEC_TIMEOUT": "900"}, "--phase-timeout-s", "export HCCL_EXEC_TIMEOUT=1800"),
    ("npu", {"HCCL_BUFFSIZE": "200MB"}, "HCCL_BUFFSIZE=200MB", "export HCCL_BUFFSIZE=200"),
    ("npu", {"HCCL_IF_BASE_PORT": "80"}, "HCCL_IF_BASE_PORT=80", "export HCCL_IF_BASE_PORT"),
    ("npu", {"HCCL_HOST_SOCKET_PORT_RANGE": "60000-59000"}, "not ports and ranges", "auto"),
    ("npu", {"HCCL_NPU_SOCKET_PORT_RANGE": "61000-"}, "not ports and ranges", "auto"),
    ("npu", {"MASTER_PORT": "60010"}, "MASTER_PORT=60010", "export MASTER_PORT"),
    ("npu", {"ASCEND_TOOLKIT_HOME": None}, "CANN's environment", "ascend-toolkit/set_env.sh"),
    ("npu", {"ATB_HOME_PATH": None}, "NNAL's environment", "nnal/atb/set_env.sh"),
    ("npu", {"TASK_QUEUE_ENABLE": "0"}, "TASK_QUEUE_ENABLE=0", "export TASK_QUEUE_ENABLE=1"),
    ("npu", {"VLLM_ASCEND_ENABLE_NZ": "1"}, "NZ", "export VLLM_ASCEND_ENABLE_NZ=0"),
    ("npu", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "=8", "CUDA_DEVICE_MAX_CONNECTIONS=1"),
    ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "0,0"}, "each once", "=0,1"),
    ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2"}, "names device 2", "unset"),
    ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "4,5"}, "names device 4", "=0,1"),
    ("npu", {"ASCEND_RT_VISIBLE_DEVICES": ""}, "no device is visible", "unset"),
    ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "1,0"}, "must ascend", "=0,1"),
    ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "0, 1"}, "nothing else", "=0,1"),
    ("cuda", {"CUDA_VISIBLE_DEVICES": "0,1,2"}, "names 3 devices", "unset"),
    ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "1"}, "2 ranks on this node and 1",
     "or change ASCEND_RT_VISIBLE_DEVICES"),
    ("npu", {"HCCL_SOCKET_IFNAME": "enp9"}, "there are: eth0, lo", "HCCL_SOCKET_IFNAME"),
    ("cuda", {"NCCL_SOCKET_IFNAME": "ib0"}, "NCCL_SOCKET_IFNAME=ib0", "one of them"),
    ("cpu", {"MASTER_ADDR": "localhost"}, "wait for itself", "MASTER_ADDR"),
]  # fmt: skip


def cases() -> Iterator[tuple[str, Facts, str, str]]:
    """All of the above: a platform, a machine on which one thing is wrong, what is said of it."""
    for name, version, platform, fix in WRONG_PACKAGES:
        yield platform, with_package(healthy(platform), name, version), version or "not", fix
    for platform, change, words, fix in FACTS_THAT_ARE_RED:
        yield platform, replace(healthy(platform), **change), words, fix  # type: ignore[arg-type]
    for platform, environ, words, fix in ENVIRONMENTS_THAT_ARE_RED:
        yield platform, with_environ(healthy(platform), environ), words, fix  # type: ignore[arg-type]


@pytest.mark.parametrize(("platform", "facts", "words", "fix"), list(cases()))
def test_what_is_wrong_is_one_red_row_with_its_fix(
    platform: str, facts: Facts, words: str, fix: str
) -> None:
    (row,) = reds(rows_of(facts, platform))
    assert words in row.what and fix in row.fix


def test_values_that_others_set_rightly_stay_green() -> None:
    facts = with_environ(
        healthy("npu"),
        {
            "HCCL_EXEC_TIMEOUT": "0",  # no limit
            "HCCL_HOST_SOCKET_PORT_RANGE": "auto", "HCCL_NPU_SOCKET_PORT_RANGE": "61000-61050",
            "GLOO_SOCKET_IFNAME": "^docker", "ASCEND_RT_VISIBLE_DEVICES": "0,1",
        },
    )  # fmt: skip
    assert not reds(rows_of(replace(facts, ports=frozenset({60001})), "npu"))
    alone = with_environ(facts, {"MASTER_ADDR": "localhost"})
    assert not reds(rows_of(alone, "npu", nodes=False))


def test_the_timeout_follows_the_longest_phase_of_the_run() -> None:
    (row,) = reds(rows_of(healthy("npu"), "npu", phase_s=14400))
    assert row.fix == "export HCCL_EXEC_TIMEOUT=14400"


def test_expandable_segments_are_taken_out_which_is_said() -> None:
    facts = with_environ(healthy("npu"), {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"})
    rows = rows_of(facts, "npu")
    assert not reds(rows)
    assert [r.status for r in rows if "expandable_segments" in r.what] == [Status.NOTE]


def test_port_sets() -> None:
    assert port_set("60000,60050-60052") == {60000, 60050, 60051, 60052}
    for wrong in ("60000-60002,60001", "a", "80", "1-70000", ""):
        assert port_set(wrong) is None, wrong


def test_the_board_is_read_from_npu_smi() -> None:
    assert soc_of("| 0     910B2               | OK |") == "a2"
    assert soc_of("| 0     Ascend910           | OK |") == "a3"
    assert soc_of("no permission") == ""


# As drivers 25.5 (A3) and 26.0 (A2, with a column more) print it.
SMI_A3 = """
| 2     Ascend910    | OK            | 178.5       36              0    / 0             |
| 0     4            | 0000:9D:00.0  | 0           0    / 0        3416 / 65536         |
| 2     Ascend910    | OK            | -           36              0    / 0             |
| 1     5            | 0000:9F:00.0  | 0           0    / 0        3195 / 65536         |
| NPU     Chip       | Process id    | Process name       | Process memory(MB)         |
| 2       1          | 41            |                    | 27001                      |
"""
SMI_A2 = """
| 6     910B3        | OK            | 91.0        36              0    / 0             |
| 0                  | 0000:41:00.0  | 0           0    / 0        3401 / 65536         |
| 7     910B3        | OK            | 95.4        37              0    / 0             |
| 0                  | 0000:42:00.0  | 0           0    / 0        3400 / 65536         |
| NPU     Chip       | Process id    | Process name | Process memory(MB) | Process id in container |
| No running processes found in NPU 6                                                             |
| 7       0          | 485946        | pytest       | 5175               | NA                      |
"""


def test_processes_are_read_from_npu_smi() -> None:
    assert processes_of(SMI_A3) == (DeviceProcess(1, 2, 1, 41, "", 27001),)
    assert processes_of(SMI_A2) == (DeviceProcess(1, 7, 0, 485946, "pytest", 5175),)
    assert not held_elsewhere(SMI_A2)
    assert held_elsewhere("dcmi model initialized failed, because the device is used. ret is -8020")


def test_small_contexts_and_devices_of_others_are_no_finding() -> None:
    small, elsewhere = (
        DeviceProcess(0, 0, 0, 7, "python", 132),
        DeviceProcess(5, 5, 0, 8, "x", 9999),
    )
    assert not reds(rows_of(replace(healthy("npu"), processes=(small, elsewhere)), "npu"))
    shared = with_environ(healthy("npu"), {"MINDSPEED_RL_ALLOW_SHARED_DEVICES": "1"})
    used = replace(shared, processes=(DeviceProcess(0, 0, 0, 9, "python", 2000),))
    assert not reds(rows_of(used, "npu"))


def test_a_later_driver_is_a_note() -> None:
    rows = rows_of(replace(healthy("npu"), driver="26.1.0"), "npu")
    assert not reds(rows)
    assert [row.status for row in rows if "26.1.0" in row.what] == [Status.NOTE]


DRIVER = "Version=7.35.23\nascendhal_version=7.35.23\nInnerversion=V100\npackage_version=25.5.0\n"


def test_versions_devices_and_processes_come_from_files_and_npu_smi(tmp_path: Path) -> None:
    """Under the names and in the formats of CANN's packages, of the driver, and of /dev."""
    ascend, device = tmp_path / "usr/local/Ascend", tmp_path / "dev"
    (ascend / "driver").mkdir(parents=True)
    device.mkdir()
    for name in ("davinci10", "davinci2", "davinci_manager", "nvidia0"):
        (device / name).touch()
    (ascend / "driver/version.info").write_text(DRIVER)
    program = tmp_path / "npu-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{SMI_A3}END\n")
    program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    facts = gather("npu", environ, root=tmp_path)
    assert facts.devices == ("/dev/davinci2", "/dev/davinci10") and facts.cann == ""
    assert facts.driver == "25.5.0" and facts.soc == "a3" and facts.processes[0].pid == 41
    (ascend / "driver/version.info").write_text("Version=24.1.rc3\nascendhal_version=7.35.19\n")
    old = ascend / "ascend-toolkit/latest"
    old.mkdir(parents=True)
    (old / "version.cfg").write_text(
        "# version: 1.0\nruntime_running_version=[7.6.0.1.220:8.0.0]\n"
    )
    facts = gather("npu", environ, root=tmp_path, ask_devices=False)
    assert (facts.driver, facts.cann, facts.processes) == ("24.1.rc3", "8.0.0", ())
    new = ascend / "cann/aarch64-linux"
    new.mkdir(parents=True)
    text = "package_name=Ascend-cann-toolkit\nversion=9.0.0\ninnerversion=V100\n"
    (new / "ascend_toolkit_install.info").write_text(text)
    assert gather("npu", environ, root=tmp_path, ask_devices=False).cann == "9.0.0"
    sourced = environ | {"ASCEND_TOOLKIT_HOME": str(old)}
    assert gather("npu", sourced, root=tmp_path, ask_devices=False).cann == "8.0.0"


def test_facts_of_this_machine() -> None:
    facts = gather("cpu", {"A": "b"})
    assert facts.python == sys.version_info[:2] and facts.environ == {"A": "b"}
    assert facts.packages["torch"].startswith(MATRIX["cpu"]["torch"][2:])
    assert "megatron.core" in facts.places and not facts.devices


def test_rows_for_a_terminal() -> None:
    rows = [green("a", "fine"), red("b", "broken", "mend it"), green("a", "too")]
    assert list(lines(rows)) == [
        "a:", "  ok    fine", "  ok    too", "b:", "  RED   broken", "        fix: mend it",
    ]  # fmt: skip
    assert "\x1b[31;1mRED " in "\n".join(lines(rows, colour=True))
    assert verdict(rows) == "2 ok, 0 notes, 1 red: fix the red ones first"


def test_a_fix_that_rows_share_is_told_once_in_each_area() -> None:
    rows = [red("a", "one", "do x"), red("a", "two", "do y"), red("a", "three", "do x")]
    rows.append(red("b", "four", "do x"))
    assert [line.split("  ")[-1].strip() for line in lines(rows)] == [
        "a:", "one", "two", "fix: do y", "three", "fix (of 2 rows): do x", "b:", "four",
        "fix: do x",
    ]  # fmt: skip


# ---- the command


def test_a_checkpoint_is_verified_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each finding; 0 where nothing is red, 1 for damage, 2 for a wrong flag."""
    from mindspeed_rl.doctor import main

    folder, target = tmp_path / "iter_0000003", str(tmp_path / "rows.json")
    folder.mkdir()
    record = {"step": 3, "extra": {}, "files": {"a.distcp": 3, "b.distcp": 4}}
    (folder / "checkpoint.json").write_text(json.dumps(record))
    (folder / "a.distcp").write_bytes(b"123")
    assert main(["--checkpoint", str(tmp_path), "--json", target]) == 1
    (row,) = json.loads(Path(target).read_text())
    assert "iter_0000003: b.distcp is missing" in row["what"] and row["status"] == "RED"
    assert "1 red" in capsys.readouterr().out
    (folder / "b.distcp").write_bytes(b"1234")
    shutil.copytree(folder, tmp_path / "kept")
    main(["--checkpoint", str(tmp_path / "kept"), "--json", target])
    assert "under the name" not in Path(target).read_text(), "it has no name of a step"
    renamed = folder.rename(tmp_path / "iter_0000030")
    assert main(["--checkpoint", str(renamed), "--json", target]) == 1
    (row,) = json.loads(Path(target).read_text())
    assert "it holds step 3 under the name of step 30: rename it to iter_0000003" in row["what"]
    assert main(["--checkpoint", str(tmp_path / "absent")]) == 2
    assert main(["--checkpoint", str(renamed), "--lr", "1e-6"]) == 2
    assert "--lr" in capsys.readouterr().err


def test_it_needs_no_torch_and_ends_with_one_when_red(tmp_path: Path) -> None:
    """In a process where torch cannot be imported: green on a CPU, red as an NPU, usage errors."""
    blocked = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'vllm', 'transformers')))\n"
        "from mindspeed_rl.doctor import main\n"
        "target = sys.argv.pop()\n"
        "sys.argv[0] = 'doctor'\n"
        "print(main(['--platform', 'cpu']), main(['--platform', 'npu', '--json', target]),\n"
        "      main(['--lr', 'x']))\n"
    )
    target = tmp_path / "rows.json"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", blocked, str(target)],
        env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "0 1 2", done.stdout + done.stderr
    assert "--lr" in done.stderr
    rows = json.loads(target.read_text())
    assert all(row["fix"] for row in rows if row["status"] == "RED")
    assert any("torch_npu is not installed" in row["what"] for row in rows)


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "home/anyone/lib"])
@pytest.mark.parametrize("editable", [False, True])
def test_megatron_core_may_be_installed_anywhere(
    editable: bool, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's folder, a prefix of the user's, an editable checkout; another one is red."""
    site, other = tmp_path / folder, tmp_path / "Megatron LM"
    told = site / "megatron_core-0.16.1.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.16.1\n")
    if editable:
        origin = {"url": other.as_uri(), "dir_info": {"editable": True}}
        (told / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(site))
    roots = gather("cpu", {}).megatron_roots
    assert roots == (str(site), str(other))[: 1 + editable]
    for place, wrong in ((site, False), (other, not editable), (tmp_path / "x", True)):
        facts = healthy("cpu")
        places = {**facts.places, "megatron.core": str(place / "megatron" / "core")}
        facts = replace(facts, places=places, megatron_roots=roots)
        assert any(str(place) in row.what for row in reds(rows_of(facts, "cpu"))) == wrong
