"""Checks the installed packages against the version matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from mindspeed_rl.diagnosis.facts import Facts
from mindspeed_rl.diagnosis.rows import DoctorRow, green, note, red

AREA = "packages"
_SET_UP = "bash pretrain_scripts/setup_env.sh, then source .venv/bin/activate"
_TORCH_URL = "https://download.pytorch.org/whl"
_MINDSPEED_URL = "https://gitcode.com/Ascend/MindSpeed"


def package_rows(
    facts: Facts, platform: str, matrix: Mapping[str, Mapping[str, str]]
) -> Iterator[DoctorRow]:
    """Check Python and every package of the platform's sections.

    Args:
        facts: Facts of this machine.
        platform: ``cpu``, ``cuda`` or ``npu``.
        matrix: Result of :func:`mindspeed_rl.core.versions.read_matrix`.
    """
    minimum = tuple(int(part) for part in matrix["python"]["minimum"].split("."))
    version = ".".join(map(str, facts.python))
    if facts.python < minimum:
        wanted = matrix["python"]["minimum"]
        yield red(AREA, f"python {version}, {wanted} or later is needed",
                  f"PYTHON=python{wanted} bash pretrain_scripts/setup_env.sh")  # fmt: skip
    else:
        yield green(AREA, f"python {version}")
    yield from _matrix_rows(facts, platform, matrix)
    yield from _torch_rows(facts, platform)
    yield from _place_rows(facts, platform)
    if platform == "npu":
        yield _mindspeed_row(facts, matrix["npu.system"]["mindspeed"])
    for folder in facts.foreign:
        yield red(AREA, f"another package named mindspeed_rl is on the path: {folder}",
                  "uninstall it (pip uninstall mindspeed-rl), or take its folder out of "
                  "PYTHONPATH")  # fmt: skip


def pinned_rows(
    facts: Facts, platform: str, matrix: Mapping[str, Mapping[str, str]]
) -> Iterator[DoctorRow]:
    """Yield a red row for every package of one exact version that is missing or another one."""
    for name, specifier, alone in _wrong(facts, platform, matrix):
        if specifier.startswith("=="):
            yield _wrong_row(facts, platform, name, specifier, alone)


def _matrix_rows(
    facts: Facts, platform: str, matrix: Mapping[str, Mapping[str, str]]
) -> Iterator[DoctorRow]:
    wrong = [_wrong_row(facts, platform, *one) for one in _wrong(facts, platform, matrix)]
    yield from wrong
    number = len(_wanted(platform, matrix))
    yield green(AREA, f"{number - len(wrong)} of {number} as versions.cfg says for {platform}")


def _wanted(platform: str, matrix: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[str, bool]]:
    """Return specifiers by package, and whether it is installed without its dependencies."""
    wanted: dict[str, tuple[str, bool]] = {}
    for section in ("core", platform, f"{platform}.no-deps"):
        alone = section.endswith(".no-deps")
        wanted |= {name: (spec, alone) for name, spec in matrix.get(section, {}).items()}
    return wanted


def _wrong(
    facts: Facts, platform: str, matrix: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, str, bool]]:
    for name, (specifier, alone) in _wanted(platform, matrix).items():
        installed = facts.packages.get(canonicalize_name(name))
        # A specifier accepts local builds such as 0.23.0+empty.
        if not (installed and SpecifierSet(specifier).contains(installed, prereleases=True)):
            yield name, specifier, alone


def _wrong_row(facts: Facts, platform: str, name: str, specifier: str, alone: bool) -> DoctorRow:
    what = f"{name} {facts.packages.get(canonicalize_name(name)) or 'is not installed'}"
    what += f", {specifier.strip()} is needed" if specifier else ""
    return red(AREA, what, _fix(name, specifier, platform, alone))


def _fix(name: str, specifier: str, platform: str, alone: bool) -> str:
    if platform == "cpu":
        return _SET_UP
    if name == "vllm" and platform == "npu":
        return (
            f"build vLLM {specifier.strip('=')} from source with VLLM_TARGET_DEVICE=empty "
            "(docs/install.md, NPU)"
        )
    return f"pip install {'--no-deps ' * alone}'{name}{specifier}'"


def _torch_rows(facts: Facts, platform: str) -> Iterator[DoctorRow]:
    version, _, local = facts.packages.get("torch", "").partition("+")
    if platform == "npu" and local.startswith("cu"):
        what, source = "a CUDA build: torch_npu refuses to load beside it", "/cpu"
    elif platform == "cuda" and local == "cpu":
        what, source = "a CPU build and sees no GPU", ""
    else:
        return
    index = f"--index-url {_TORCH_URL}{source}" if source else "from the default index"
    yield red(AREA, f"torch {version}+{local} is {what}",
              f"pip install --force-reinstall --no-deps 'torch=={version}' {index}")  # fmt: skip


def _place_rows(facts: Facts, platform: str) -> Iterator[DoctorRow]:
    megatron = facts.places.get("megatron.core", "")
    if megatron and facts.megatron_roots and not _is_within(megatron, facts.megatron_roots):
        yield red(AREA, f"megatron.core comes from {megatron}, not from the installed "
                  f"megatron-core {facts.packages['megatron-core']} in {facts.megatron_roots[0]}",
                  "take the Megatron-LM repository out of PYTHONPATH")  # fmt: skip
    if platform != "npu":
        return
    if facts.soc and facts.engine_soc and facts.soc.upper() != facts.engine_soc.upper():
        yield red(AREA, f"vllm-ascend was built for {facts.engine_soc}, this machine is an "
                  f"{facts.soc.upper()}: its worker refuses to start",
                  "build it from source with SOC_VERSION of this machine (docs/install.md, A2 "
                  "against A3)")  # fmt: skip


def _is_within(place: str, roots: Iterable[str]) -> bool:
    """Whether a file is in one of the folders, also by a symbolic link."""
    return any(Path(place).resolve().is_relative_to(Path(root).resolve()) for root in roots)


def _mindspeed_row(facts: Facts, wanted: str) -> DoctorRow:
    """Check MindSpeed's branch: its adaptor changes the inside of one megatron-core version."""
    place = facts.places.get("mindspeed", "")
    if not place:
        return note(AREA, "MindSpeed cannot be imported: megatron-core's own modules run, and "
                    "MindSpeed's flags are refused",
                    f"git clone -b {wanted} {_MINDSPEED_URL}, and put the folder on "
                    "PYTHONPATH")  # fmt: skip
    branch, version = facts.mindspeed_branch, facts.mindspeed_version
    found = " ".join(["version", version] * bool(version) + ["of branch", branch] * bool(branch))
    if wanted == branch or version == wanted.rpartition("_r")[2]:
        return green(AREA, f"MindSpeed {found} in {place}, {wanted} is needed")
    if version or "core_r" in branch:  # users may name their own branches freely
        return red(AREA, f"MindSpeed {found} in {place}, branch {wanted} is needed",
                   f"git switch {wanted} in that checkout, or git clone -b {wanted} "
                   f"{_MINDSPEED_URL} and put the folder on PYTHONPATH instead")  # fmt: skip
    return note(AREA, f"MindSpeed in {place} does not say its branch or version; {wanted} is "
                "needed", f"git clone -b {wanted} {_MINDSPEED_URL} in its place")  # fmt: skip
