"""Checks the installed packages against the version matrix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.core.versions import section_for
from mindspeed_rl.diagnosis.facts import Facts, canonical_name
from mindspeed_rl.diagnosis.rows import DoctorRow, green, note, red

AREA = "packages"
_SET_UP = "bash pretrain_scripts/setup_env.sh, then source .venv/bin/activate"
_TORCH_URL = "https://download.pytorch.org/whl"
_MINDSPEED_URL = "https://gitcode.com/Ascend/MindSpeed"
_ALONE = "pretrain and score --backend megatron run without it, train_rl does not"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A package of the matrix.

    Attributes:
        name: Its name.
        specifier: Versions; may be empty.
        alone: Whether it is installed without its dependencies.
    """

    name: str
    specifier: str
    alone: bool = False

    @property
    def of_engine(self) -> bool:
        """Whether nothing but an inference engine needs it."""
        return self.alone or self.name.startswith("vllm")


def package_rows(
    facts: Facts,
    platform: str,
    matrix: Mapping[str, Mapping[str, str]],
    *,
    engine: bool = True,
) -> Iterator[DoctorRow]:
    """Check Python and every package of the platform's sections.

    Args:
        facts: Facts of this machine.
        platform: ``cpu``, ``cuda`` or ``npu``.
        matrix: Result of :func:`mindspeed_rl.core.versions.read_matrix`.
        engine: Whether there has to be an inference engine. Otherwise one that is not installed is
            a note; one of another version is red nevertheless.
    """
    minimum = tuple(int(part) for part in matrix["python"]["minimum"].split("."))
    version = ".".join(map(str, facts.python))
    if facts.python < minimum:
        wanted = matrix["python"]["minimum"]
        yield red(AREA, f"python {version}, {wanted} or later is needed",
                  f"PYTHON=python{wanted} bash pretrain_scripts/setup_env.sh")  # fmt: skip
    else:
        yield green(AREA, f"python {version}")
    yield from _matrix_rows(facts, platform, matrix, engine)
    yield from _torch_rows(facts, platform)
    yield from _place_rows(facts, platform)
    if platform == "npu":
        yield _mindspeed_row(facts, matrix["npu.system"]["mindspeed"])
    for folder in facts.foreign:
        yield red(AREA, f"another package named mindspeed_rl is on the path: {folder}",
                  "uninstall it (pip uninstall mindspeed-rl), or take its folder out of "
                  "PYTHONPATH")  # fmt: skip


def pinned_rows(
    facts: Facts,
    platform: str,
    matrix: Mapping[str, Mapping[str, str]],
    *,
    engine: bool = True,
) -> Iterator[DoctorRow]:
    """Yield a red row for torch and every package of one exact version if it is another or missing.

    Without ``engine`` those that only an inference engine needs may be missing, and torch is that
    of the set for trainers, where the platform has one.
    """
    section = section_for(platform, _torch(facts), matrix, engine=engine)
    for wanted in _wrong(facts, platform, matrix, section):
        exact = wanted.specifier.startswith("==") or wanted.name == "torch"
        if exact and (engine or not wanted.of_engine):
            yield _wrong_row(facts, platform, wanted)


def _matrix_rows(
    facts: Facts, platform: str, matrix: Mapping[str, Mapping[str, str]], engine: bool
) -> Iterator[DoctorRow]:
    there = engine or "vllm" in facts.packages or not _torch(facts)
    section = section_for(platform, _torch(facts), matrix, engine=there)
    wrong = [*_wrong(facts, platform, matrix, section)]
    for wanted in wrong:
        row = _wrong_row(facts, platform, wanted)
        if not engine and wanted.of_engine and canonical_name(wanted.name) not in facts.packages:
            row = note(row.area, f"{row.what}: {_ALONE}", row.fix)
        yield row
    if section == "cuda-trainer":
        yield _missing_engine_row(facts, matrix)
    number = len(_wanted(platform, matrix, section))
    yield green(AREA, f"{number - len(wrong)} of {number} as versions.cfg says for {section}")


def _missing_engine_row(facts: Facts, matrix: Mapping[str, Mapping[str, str]]) -> DoctorRow:
    """Return the note that there is no vLLM, with that of the set that has this torch."""
    torch = _torch(facts)
    known = matrix[section_for("cuda", torch, matrix)]
    if torch.partition("+")[0].startswith(known["torch"][2:].removesuffix("*")):
        wanted = _Wanted("vllm", known["vllm"])
        what = f"vllm is not installed, {wanted.specifier} belongs to torch {torch}: {_ALONE}"
        return note(AREA, what, _fix(facts, "cuda", wanted))
    what = f"vllm is not installed, and no set has one for torch {torch}: {_ALONE}"
    return note(AREA, what, "for train_rl an environment of the set cuda (docs/install.md, CUDA)")


def _torch(facts: Facts) -> str:
    return facts.packages.get("torch", "")


def _wanted(
    platform: str, matrix: Mapping[str, Mapping[str, str]], section: str
) -> tuple[_Wanted, ...]:
    """Return the packages of a set; a later section of it decides."""
    wanted = {
        name: _Wanted(name, specifier, part.endswith(".no-deps"))
        for part in ("core", section, f"{platform}.no-deps")
        for name, specifier in matrix.get(part, {}).items()
    }
    return tuple(wanted.values())


def _wrong(
    facts: Facts, platform: str, matrix: Mapping[str, Mapping[str, str]], section: str
) -> Iterator[_Wanted]:
    try:
        from packaging.specifiers import SpecifierSet
    except ModuleNotFoundError:  # a bare machine, of which no version can be compared
        yield _Wanted("packaging", "")
        return
    for wanted in _wanted(platform, matrix, section):
        installed = facts.packages.get(canonical_name(wanted.name))
        allowed = SpecifierSet(wanted.specifier)
        # A specifier accepts local builds such as 0.23.0+empty.
        if not (installed and allowed.contains(installed, prereleases=True)):
            yield wanted


def _wrong_row(facts: Facts, platform: str, wanted: _Wanted) -> DoctorRow:
    what = f"{wanted.name} {facts.packages.get(canonical_name(wanted.name)) or 'is not installed'}"
    what += f", {wanted.specifier.strip()} is needed" if wanted.specifier else ""
    return red(AREA, what, _fix(facts, platform, wanted))


def _fix(facts: Facts, platform: str, wanted: _Wanted) -> str:
    if platform == "cpu":
        return _SET_UP
    version = wanted.specifier.strip("=")
    if wanted.name == "vllm" and platform == "npu":
        return (
            f"build vLLM {version} from source with VLLM_TARGET_DEVICE=empty (docs/install.md, NPU)"
        )
    torch = _torch(facts).partition("+")[0]
    # vLLM's wheel asks for a release of torch, and pip would put that in place of the machine's.
    if wanted.name == "vllm" and torch and not re.fullmatch(r"[\d.]+", torch):
        return f"build vLLM {version} from source against this torch (docs/install.md, CUDA)"
    return f"pip install {'--no-deps ' * wanted.alone}'{wanted.name}{wanted.specifier}'"


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
