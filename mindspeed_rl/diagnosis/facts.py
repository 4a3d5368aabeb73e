"""Gathers facts about this machine quickly: without torch, devices or network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.utils import canonicalize_name

from mindspeed_rl.core.installed import foreign_packages

_ASCEND = Path("/usr/local/Ascend")
_VERSION = r"^\s*version\s*=\s*\[?([^\s\]:]+)"
_SMI_S = 5.0
_LISTEN = "0A"  # state of a listening socket in /proc/net/tcp


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the checks use; tests make their own.

    Attributes:
        python: Version of the interpreter.
        packages: Version of every installed distribution, by normalised name.
        places: File or folder of each module that can be imported, by module name.
        foreign: Other packages named ``mindspeed_rl`` on the path.
        environ: Environment of a run, including defaults of the bootstrap.
        interfaces: Names of network interfaces.
        ports: TCP ports on which a process listens.
        devices: Device nodes of the platform: ``/dev/davinci0``, ``/dev/nvidia0``, ...
        driver: Version of the NPU driver; empty if there is none.
        cann: Version of CANN; empty if there is none.
        soc: ``"a2"``, ``"a3"``, or empty if npu-smi does not show it.
        engine_soc: SoC of the vllm-ascend build, in its spelling (``A2``); empty: unknown.
        mindspeed_branch: Branch of its checkout; empty: not a checkout, or at no branch.
        mindspeed_version: Version in its setup.py, else in pip; empty: unknown.
        shm_bytes: Size of /dev/shm; ``None``: there is none.
    """

    python: tuple[int, int] = (0, 0)
    packages: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    interfaces: frozenset[str] = frozenset()
    ports: frozenset[int] = frozenset()
    devices: tuple[str, ...] = ()
    driver: str = ""
    cann: str = ""
    soc: str = ""
    engine_soc: str = ""
    mindspeed_branch: str = ""
    mindspeed_version: str = ""
    shm_bytes: int | None = None


def device_nodes(platform: str) -> tuple[str, ...]:
    """Return the device nodes of a platform, in the order of their numbers."""
    stem = {"npu": "/dev/davinci", "cuda": "/dev/nvidia"}.get(platform)
    if stem is None:
        return ()
    numbers = [str(p).removeprefix(stem) for p in Path("/dev").glob(f"{Path(stem).name}*")]
    return tuple(f"{stem}{n}" for n in sorted(int(n) for n in numbers if n.isdecimal()))


def guess_platform() -> str:
    """Guess the platform of this machine from its packages and devices."""
    if find_spec("torch_npu") or device_nodes("npu"):
        return "npu"
    return "cuda" if device_nodes("cuda") else "cpu"


def gather(platform: str, environ: Mapping[str, str]) -> Facts:
    """Gather the facts of this machine. Local; reads files and runs npu-smi if it is installed."""
    npu = platform == "npu"
    # Python imports the first of several packages with one name, so it must come last here.
    packages: dict[str, str] = {
        canonicalize_name(name): one.version
        for one in reversed(list(distributions()))
        if (name := one.metadata["Name"])
    }
    places = dict(_places("torch", "megatron.core", "mindspeed", "vllm_ascend"))
    branch, version = checkout(places.get("mindspeed", ""))
    engine = Path(places.get("vllm_ascend", "/")).parent / "_build_info.py"
    return Facts(
        python=sys.version_info[:2],
        packages=packages,
        places=places,
        foreign=tuple(foreign_packages()),
        environ=dict(environ),
        interfaces=frozenset(p.name for p in Path("/sys/class/net").glob("*")),
        ports=frozenset(_listening()),
        devices=device_nodes(platform),
        driver=_said(_ASCEND / "driver/version.info", _VERSION) if npu else "",
        cann=_cann(environ) if npu else "",
        soc=_soc() if npu else "",
        engine_soc=_said(engine, r"__device_type__\s*=\s*[\"'](\w+)") if npu else "",
        mindspeed_branch=branch,
        mindspeed_version=version or packages.get("mindspeed", ""),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
    )


def _places(*modules: str) -> Iterator[tuple[str, str]]:
    for name in modules:
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):  # the parent package is missing or broken
            continue
        if spec is not None:
            yield name, spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def checkout(package: str) -> tuple[str, str]:
    """Return branch and version of the checkout that a package is in, each empty if unknown.

    Args:
        package: The package's folder, or its ``__init__.py``.
    """
    if not package:
        return "", ""
    folder = Path(package)
    root = folder.parents[1] if folder.suffix == ".py" else folder.parent
    return (
        _said(root / ".git/HEAD", r"^ref: refs/heads/(\S+)"),
        _said(root / "setup.py", r"^__version__\s*=\s*[\"']([^\"']+)"),
    )


def _said(file: Path, pattern: str) -> str:
    """Return the first group of a pattern in a file; empty if file or match is missing."""
    if not file.is_file():
        return ""
    found = re.search(pattern, file.read_text(errors="replace"), re.M | re.I)
    return found[1] if found else ""


def _listening() -> Iterator[int]:
    for table in filter(Path.is_file, (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))):
        for line in table.read_text().splitlines()[1:]:
            _, address, _, state, *_ = line.split()
            if state == _LISTEN:
                yield int(address.rpartition(":")[2], 16)


def _cann(environ: Mapping[str, str]) -> str:
    """Return the version of the toolkit whose set_env.sh was sourced, else of the usual one."""
    home = environ.get("ASCEND_TOOLKIT_HOME") or environ.get("ASCEND_HOME_PATH")
    folders = [Path(home)] if home else []
    files: list[Path] = []
    for folder in (*folders, _ASCEND / "ascend-toolkit/latest"):
        files += [*folder.glob("*/ascend_toolkit_install.info"), folder / "version.cfg"]
    return next(filter(None, (_said(file, _VERSION) for file in files)), "")


def _soc() -> str:
    try:
        done = subprocess.run(
            ["npu-smi", "info"], capture_output=True, text=True, timeout=_SMI_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # npu-smi is missing, or hangs with the driver
        return ""
    return soc_of(done.stdout)


def soc_of(table: str) -> str:
    """Return ``a2`` or ``a3`` from the output of ``npu-smi info``; empty if it shows neither.

    A2 boards show the name of their chip (910B2), A3 boards do not.
    """
    if re.search(r"\b910B", table):
        return "a2"
    return "a3" if re.search(r"\b(Ascend910|910_93|910C)", table) else ""


def local_size(environ: Mapping[str, str]) -> int:
    """Return the number of ranks of this node, as torchrun sets it; 1 without torchrun."""
    return int(environ.get("LOCAL_WORLD_SIZE", "1"))
