"""Doctor and start in a container of vLLM-Ascend's image, whose files lie under a folder here.

The image has Python 3.12, CANN, and everything up to vllm-ascend among the packages of the system,
vLLM and vllm-ascend as their sources. What is installed on top goes there as well, or into a
virtual environment that sees the packages of the system.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.versions import mindspeed_branch, read_matrix
from mindspeed_rl.diagnosis.devices import device_rows
from mindspeed_rl.diagnosis.environment import environment_rows
from mindspeed_rl.diagnosis.facts import Facts, gather
from mindspeed_rl.diagnosis.packages import package_rows
from mindspeed_rl.diagnosis.rows import Status
from mindspeed_rl.launch import bootstrap, machine

MATRIX = read_matrix()
# What the image's Dockerfile installs, as pip names its versions there, with libraries of versions
# that the set allows; and what comes on top.
IMAGE = {
    "torch": "2.10.0+cpu", "torch-npu": "2.10.0.post4", "torchvision": "0.25.0",
    "torchaudio": "2.10.0", "transformers": "5.5.4", "triton-ascend": "3.2.2",
    "vllm": "0.23.0+empty", "vllm-ascend": "0.23.0", "numpy": "1.26.4", "packaging": "25.0",
    "safetensors": "0.6.2", "tokenizers": "0.22.2", "tqdm": "4.67.1", "ray": "2.48.0",
}  # fmt: skip
ADDED = {
    "megatron-core": "0.16.1", "math-verify": "0.9.0", "datasets": "5.2.0", "pyarrow": "26.0.1",
    "xxhash": "3.6.0", "tensorboard": "2.21.0", "matplotlib": "3.11.2",
}  # fmt: skip
MODULES = ("torch", "megatron", "mindspeed", "vllm_ascend")
SMI = "| 2     Ascend910    | OK            | 178.5       36              0    / 0             |\n"


@dataclass(frozen=True)
class Container:
    """A root folder with the files of a container, and the packages that its Python sees."""

    root: Path

    @property
    def system(self) -> Path:
        return self.root / "usr/local/python3.12/lib/python3.12/site-packages"

    @property
    def venv(self) -> Path:
        return self.root / "venv/lib/python3.12/site-packages"

    @property
    def toolkit(self) -> Path:
        return self.root / "usr/local/Ascend/ascend-toolkit/latest"

    def set_cann(self, version: str) -> None:
        write(
            self.toolkit / "aarch64-linux/ascend_toolkit_install.info",
            f"package_name=Ascend-cann-toolkit\nversion={version}\n",
        )

    def set_driver(self, version: str) -> None:
        write(
            self.root / "usr/local/Ascend/driver/version.info",
            f"Version={version}\nascendhal_version=7.35.23\npackage_version={version}\n",
        )

    def facts(self, *site: Path) -> Facts:
        """What is gathered by a Python 3.12 that has these folders of packages.

        Sources that are installed as such, and MindSpeed, come from paths of their own. Ports and
        shared memory are not those of this machine.
        """
        environ = {
            "ASCEND_TOOLKIT_HOME": str(self.toolkit), "ATB_HOME_PATH": "/nnal/atb",
            "TASK_QUEUE_ENABLE": "1", "PATH": f"{self.root}/usr/local/bin:/usr/bin:/bin",
            "LOCAL_WORLD_SIZE": "2",
        }  # fmt: skip
        bootstrap.set_defaults("npu", environ)
        own = [p for p in sys.path if not p.endswith(("site-packages", "dist-packages"))]
        sources = [self.root / "MindSpeed", self.root / "vllm-workspace/vllm-ascend"]
        path = [*map(str, [*sources, *site]), *own]
        with patch.dict(sys.modules), patch.object(sys, "path", path):
            for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
                del sys.modules[name]
            importlib.invalidate_caches()
            found = gather("npu", environ, root=self.root)
        return replace(found, python=(3, 12), ports=frozenset(), shm_bytes=2**34)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def install(folder: Path, packages: Mapping[str, str]) -> None:
    for name, version in packages.items():
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        write(folder / f"{name.replace('-', '_')}-{version}.dist-info/METADATA", text)


@pytest.fixture
def container(tmp_path: Path) -> Container:
    made = Container(tmp_path)
    install(made.system, IMAGE)
    write(tmp_path / "vllm-workspace/vllm-ascend/vllm_ascend/__init__.py", "")
    write(
        tmp_path / "vllm-workspace/vllm-ascend/vllm_ascend/_build_info.py",
        "# Auto-generated file\n__device_type__ = 'A3'\n",
    )
    write(tmp_path / "MindSpeed/mindspeed/__init__.py", "")
    write(tmp_path / "MindSpeed/.git/HEAD", f"ref: refs/heads/{mindspeed_branch()}\n")
    for device in range(2):
        write(tmp_path / f"dev/davinci{device}", "")
    write(tmp_path / "usr/local/bin/npu-smi", f"#!/bin/sh\ncat <<'END'\n{SMI}END\n")
    (tmp_path / "usr/local/bin/npu-smi").chmod(0o755)
    made.set_cann("9.1.0")
    made.set_driver("26.0.rc1")
    return made


def add_this_project(container: Container, folder: Path) -> None:
    """As pip does: what the image has stays there."""
    install(folder, ADDED)
    write(folder / "megatron/core/__init__.py", "")


def reds(facts: Facts) -> list[str]:
    """What the doctor finds wrong."""
    rows = [
        *package_rows(facts, "npu", MATRIX),
        *environment_rows(facts, "npu", longest_phase_s=1800, several_nodes=False),
        *device_rows(facts, "npu", MATRIX),
    ]
    return [row.what for row in rows if row.status is Status.RED]


class Started(Exception):
    """The checks before the first import of torch passed."""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Facts], None]]:
    def import_torch_npu(environ: Mapping[str, str]) -> None:
        raise Started

    def started_with(facts: Facts) -> None:
        monkeypatch.setattr(machine, "gather", lambda *_, **__: facts)
        machine.check_machine("npu", facts.environ)

    monkeypatch.setattr(machine, "import_torch_npu", import_torch_npu)
    yield started_with


@pytest.mark.parametrize("in_venv", [False, True], ids=["system", "virtual environment"])
def test_the_image_with_this_project_is_a_supported_machine(
    in_venv: bool, container: Container, start: Callable[[Facts], None]
) -> None:
    add_this_project(container, container.venv if in_venv else container.system)
    facts = container.facts(*[container.venv] * in_venv, container.system)
    assert (facts.cann, facts.driver, facts.soc, facts.engine_soc) == (
        "9.1.0", "26.0.rc1", "a3", "A3",
    )  # fmt: skip
    assert facts.packages["torch"] == "2.10.0+cpu"
    assert reds(facts) == []
    with pytest.raises(Started):
        start(facts)


def test_a_virtual_environment_that_hides_the_image_is_told(
    container: Container, start: Callable[[Facts], None]
) -> None:
    add_this_project(container, container.venv)
    facts = container.facts(container.venv)
    missing = ("torch", "torch_npu", "transformers", "vllm-ascend", "vllm")
    for name in missing:
        assert [what for what in reds(facts) if what.startswith(f"{name} is not installed")]
    with pytest.raises(UsageError, match="torch_npu is not installed"):
        start(facts)


@pytest.mark.parametrize(
    ("name", "version"), [("torch", "2.13.0+cu130"), ("transformers", "5.16.1")]
)
def test_what_pip_put_before_a_package_of_the_image_is_told(
    name: str, version: str, container: Container, start: Callable[[Facts], None]
) -> None:
    """In a virtual environment a package hides that of the system."""
    add_this_project(container, container.venv)
    install(container.venv, {name: version})
    facts = container.facts(container.venv, container.system)
    wrong = reds(facts)
    assert wrong and all(what.startswith(f"{name} {version}") for what in wrong)
    with pytest.raises(UsageError, match=rf"{name} {version}".replace("+", r"\+")):
        start(facts)


# CANN, driver; what is said of them: by the doctor, and by a start
SYSTEMS = [
    ("8.5.0", "26.0.rc1", ["CANN 8.5.0, 9.1.0 is needed"]),
    ("9.1.0", "25.5.0", ["driver (HDK) 25.5.0, 26.0.rc1 or later is needed"]),
    ("9.0.0", "24.1.rc3",
     ["CANN 9.0.0, 9.1.0 is needed", "driver (HDK) 24.1.rc3, 26.0.rc1 or later is needed"]),
    ("9.1.0", "26.1.0", []),
]  # fmt: skip


@pytest.mark.parametrize(("cann", "driver", "words"), SYSTEMS)
def test_another_cann_or_driver_is_one_line(
    cann: str,
    driver: str,
    words: list[str],
    container: Container,
    start: Callable[[Facts], None],
) -> None:
    add_this_project(container, container.system)
    container.set_cann(cann)
    container.set_driver(driver)
    facts = container.facts(container.system)
    assert reds(facts) == words
    with pytest.raises(UsageError if words else Started) as refused:
        start(facts)
    told = str(refused.value)
    assert all(word in told for word in words) and "\n" not in told
    allowed = replace(facts, environ={**facts.environ, "MINDSPEED_RL_ALLOW_VERSIONS": "1"})
    with pytest.raises(Started):
        start(allowed)


def test_a_container_without_the_driver_of_the_host_is_told(container: Container) -> None:
    add_this_project(container, container.system)
    (container.root / "usr/local/Ascend/driver/version.info").unlink()
    (container.root / "usr/local/bin/npu-smi").unlink()
    (wrong,) = reds(container.facts(container.system))
    assert wrong.startswith("driver (HDK): no version found")
