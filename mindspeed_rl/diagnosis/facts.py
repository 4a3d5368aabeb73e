"""Gathers facts about this machine quickly: without torch, devices or network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from mindspeed_rl.core.installed import foreign_packages
from mindspeed_rl.diagnosis.npu_smi import DeviceProcess, held_elsewhere, processes_of, soc_of

# CANN's folder since 8.5 and before, below /usr/local/Ascend, where set_env.sh was not sourced.
_TOOLKITS = ("cann", "ascend-toolkit/latest")
_VERSION = r"^\s*version\s*=\s*(\S+)"
# version.cfg has a line per component: toolkit_running_version=[7.6.0.1.220:8.0.0]
_RUNNING = r"^\s*(?:toolkit|runtime)_running_version\s*=\s*\[(?:[^\]:]*:)?([^\]\s]+)\]"
# The driver's own version; "Version" of older packages is the same one.
_DRIVER = (r"^\s*package_version\s*=\s*(\S+)", _VERSION)
# Of the kernel module, open or not: "... Kernel Module for x86_64  580.65.06  Release Build".
_NVIDIA = r"^NVRM version:.*Kernel Module(?: for \S+)?\s+(\d[\d.]*)"
_SMI_S = 10.0
_LISTEN = "0A"  # state of a listening socket in /proc/net/tcp


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the checks use; tests make their own.

    Attributes:
        python: Version of the interpreter.
        packages: Version of every installed distribution, by normalised name.
        places: File or folder of each module that can be imported, by module name.
        megatron_roots: Folders that hold the installed megatron-core: where pip put it, and the
            sources of an editable install; empty if it is not installed.
        foreign: Other packages named ``mindspeed_rl`` on the path.
        environ: Environment of a run, including defaults of the bootstrap.
        interfaces: Names of network interfaces.
        ports: TCP ports on which a process listens.
        devices: Device nodes of the platform: ``/dev/davinci0``, ``/dev/nvidia0``, ...
        driver: Version of the driver of the platform's devices; empty if there is none.
        cann: Version of CANN; empty if there is none.
        soc: ``"a2"``, ``"a3"``, or empty if npu-smi does not show it.
        processes: Processes on the NPUs, as npu-smi lists them.
        held: Whether npu-smi says that another container holds the NPUs.
        engine_soc: SoC of the vllm-ascend build, in its spelling (``A2``); empty: unknown.
        mindspeed_branch: Branch of its checkout; empty: not a checkout, or at no branch.
        mindspeed_version: Version in its setup.py, else in pip; empty: unknown.
        shm_bytes: Size of /dev/shm; ``None``: there is none.
    """

    python: tuple[int, int] = (0, 0)
    packages: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    megatron_roots: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    interfaces: frozenset[str] = frozenset()
    ports: frozenset[int] = frozenset()
    devices: tuple[str, ...] = ()
    driver: str = ""
    cann: str = ""
    soc: str = ""
    processes: tuple[DeviceProcess, ...] = ()
    held: bool = False
    engine_soc: str = ""
    mindspeed_branch: str = ""
    mindspeed_version: str = ""
    shm_bytes: int | None = None


def device_nodes(platform: str, root: Path = Path("/")) -> tuple[str, ...]:
    """Return the device nodes of a platform, in the order of their numbers."""
    stem = {"npu": "davinci", "cuda": "nvidia"}.get(platform)
    if stem is None:
        return ()
    numbers = [path.name.removeprefix(stem) for path in (root / "dev").glob(f"{stem}*")]
    return tuple(f"/dev/{stem}{n}" for n in sorted(int(n) for n in numbers if n.isdecimal()))


def guess_platform() -> str:
    """Guess the platform of this machine from its packages and devices."""
    if find_spec("torch_npu") or device_nodes("npu"):
        return "npu"
    return "cuda" if device_nodes("cuda") else "cpu"


def canonical_name(name: str) -> str:
    """Return the name of a package as indices compare it (PEP 503). Pure.

    The package ``packaging`` has the same, but a bare machine lacks it.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def gather(
    platform: str, environ: Mapping[str, str], *, ask_devices: bool = True, root: Path = Path("/")
) -> Facts:
    """Gather the facts of this machine. Local; reads files and runs npu-smi if it is installed.

    Args:
        platform: ``cpu``, ``cuda`` or ``npu``.
        environ: Environment of a run.
        ask_devices: Whether to run npu-smi, which takes a second or more.
        root: Folder that has ``dev`` and ``usr/local/Ascend`` of this machine.
    """
    npu = platform == "npu"
    smi = _npu_smi(environ) if npu and ask_devices else ""
    # Python imports the first of several packages with one name, so it must come last here.
    packages: dict[str, str] = {
        canonical_name(name): one.version
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
        megatron_roots=tuple(_roots("megatron-core")),
        foreign=tuple(foreign_packages()),
        environ=dict(environ),
        interfaces=frozenset(p.name for p in Path("/sys/class/net").glob("*")),
        ports=frozenset(_listening()),
        devices=device_nodes(platform, root),
        driver=_driver(root, platform),
        cann=_cann(environ, root) if npu else "",
        soc=soc_of(smi),
        processes=processes_of(smi),
        held=held_elsewhere(smi),
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


def _roots(package: str) -> Iterator[str]:
    """Yield the folders that hold the modules of an installed package."""
    try:
        installed = distribution(package)
    except PackageNotFoundError:
        return
    yield str(installed.locate_file(""))
    origin = json.loads(installed.read_text("direct_url.json") or "{}")  # PEP 610
    if origin.get("dir_info", {}).get("editable"):
        yield url2pathname(urlsplit(origin["url"]).path)


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


def _cann(environ: Mapping[str, str], root: Path) -> str:
    """Return the version of the toolkit whose set_env.sh was sourced, else of the usual one."""
    home = environ.get("ASCEND_TOOLKIT_HOME") or environ.get("ASCEND_HOME_PATH")
    usual = (root / "usr/local/Ascend" / folder for folder in _TOOLKITS)
    for folder in (*([Path(home)] if home else ()), *usual):
        installed = sorted(folder.glob("*/ascend_toolkit_install.info"))
        found = [_said(file, _VERSION) for file in installed]
        found.append(_said(folder / "version.cfg", _RUNNING))
        if version := next(filter(None, found), ""):
            return version
    return ""


def _driver(root: Path, platform: str) -> str:
    if platform == "cuda":
        return _said(root / "proc/driver/nvidia/version", _NVIDIA)
    if platform != "npu":
        return ""
    file = root / "usr/local/Ascend/driver/version.info"
    return next(filter(None, (_said(file, pattern) for pattern in _DRIVER)), "")


def device_topology(environ: Mapping[str, str]) -> str:
    """Return the table of connections between NPUs and cores; empty without ``npu-smi``. Local."""
    return _npu_smi(environ, "-t", "topo")


def _npu_smi(environ: Mapping[str, str], *more: str) -> str:
    """Return what ``npu-smi info`` prints, its complaints included; empty without an answer."""
    program = shutil.which("npu-smi", path=environ.get("PATH"))
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "info", *more], capture_output=True, text=True, timeout=_SMI_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # it cannot be run, or hangs with the driver
        return ""
    return done.stdout + done.stderr


def local_size(environ: Mapping[str, str]) -> int:
    """Return the number of ranks of this node, as torchrun sets it; 1 without torchrun."""
    return int(environ.get("LOCAL_WORLD_SIZE", "1"))
