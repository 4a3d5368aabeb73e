"""What this machine is and has, read in no time: no torch, no devices, no network."""

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
    """Everything that the checks look at; tests make their own.

    Attributes:
        python: version of the interpreter.
        packages: version of every installed distribution, by normalised name.
        places: file or folder of a module that can be imported, by module name.
        foreign: other packages named ``mindspeed_rl`` on the path.
        environ: environment of a run, defaults of the bootstrap included.
        interfaces: network interfaces.
        ports: TCP ports that somebody listens on.
        devices: device nodes of the platform: ``/dev/davinci0``, ``/dev/nvidia0``, ...
        driver: version of the NPU driver; empty when there is none.
        cann: version of CANN; empty when there is none.
        soc: ``"a2"``, ``"a3"``, or empty where npu-smi does not say.
        engine_soc: what vllm-ascend was built for, in its own words (``A2``); empty: unknown.
        mindspeed_branch: of its checkout; empty: not a checkout, or at no branch.
        mindspeed_version: as its setup.py says it, else as pip does; empty: unknown.
        shm_bytes: size of /dev/shm; ``None``: there is none.
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
    """Device nodes of a platform, in the order of their numbers."""
    stem = {"npu": "/dev/davinci", "cuda": "/dev/nvidia"}.get(platform)
    if stem is None:
        return ()
    numbers = [str(p).removeprefix(stem) for p in Path("/dev").glob(f"{Path(stem).name}*")]
    return tuple(f"{stem}{n}" for n in sorted(int(n) for n in numbers if n.isdecimal()))


def guess_platform() -> str:
    """The platform of this machine by what is installed and what devices there are."""
    if find_spec("torch_npu") or device_nodes("npu"):
        return "npu"
    return "cuda" if device_nodes("cuda") else "cpu"


def gather(platform: str, environ: Mapping[str, str]) -> Facts:
    """Look at this machine. Local; reads files and asks npu-smi where it is there."""
    npu = platform == "npu"
    # of several of one name the first on the path is imported, so it comes last here
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
        except (ImportError, ValueError):  # the parent package is not there, or is broken
            continue
        if spec is not None:
            yield name, spec.origin or next(iter(spec.submodule_search_locations or ()), "")


def checkout(package: str) -> tuple[str, str]:
    """Branch and version of the checkout that a package lies in, each empty where it is not said.

    Args:
        package: its folder, or its ``__init__.py``.
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
    """The first group of a pattern in a file; empty when it is not there."""
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
    """Version of the toolkit whose set_env.sh was sourced, else of the usual place."""
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
    except (OSError, subprocess.TimeoutExpired):  # it is not installed, or hangs with the driver
        return ""
    return soc_of(done.stdout)


def soc_of(table: str) -> str:
    """``a2`` or ``a3`` from what ``npu-smi info`` prints; empty when it says neither.

    A2 boards name their chip (910B2), those of A3 do not.
    """
    if re.search(r"\b910B", table):
        return "a2"
    return "a3" if re.search(r"\b(Ascend910|910_93|910C)", table) else ""


def local_size(environ: Mapping[str, str]) -> int:
    """Ranks of this node, as torchrun says; 1 without it."""
    return int(environ.get("LOCAL_WORLD_SIZE", "1"))
