"""Which package set an installed torch belongs to, and which engines of it are known."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
from support.layout_cases import GQA, MOE, spec_of

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig, ScoreRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.core.versions import engine_versions, read_matrix, section_for
from mindspeed_rl.diagnosis.facts import Facts, canonical_name
from mindspeed_rl.diagnosis.packages import package_rows, pinned_rows
from mindspeed_rl.diagnosis.rows import Status
from mindspeed_rl.engines.vllm import capabilities
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.launch.job import has_engine


@pytest.mark.parametrize(
    ("platform", "torch", "section"),
    [
        ("cuda", "2.13.0", "cuda"),
        ("cuda", "2.11.0+cu130", "cuda-torch211"),
        ("cuda", "2.11.0a0+git.nv26.2", "cuda-torch211"),
        ("cuda", "2.12.0", "cuda"),
        ("cuda", "", "cuda"),
        ("cpu", "2.11.0", "cpu"),
        ("npu", "2.10.0", "npu"),
    ],
)
def test_the_set_follows_the_installed_torch(platform: str, torch: str, section: str) -> None:
    assert section_for(platform, torch) == section


def test_a_trainer_without_an_engine_has_its_own_set() -> None:
    assert section_for("cuda", "2.12.0", engine=False) == "cuda-trainer"
    assert section_for("cpu", "2.13.0", engine=False) == "cpu"


def test_every_set_has_the_release_that_belongs_to_its_torch() -> None:
    assert engine_versions("cuda", "vllm") == ["0.32.0", "0.23.0"]
    assert engine_versions("npu", "vllm") == ["0.23.0"]
    assert engine_versions("npu", "vllm-ascend") == ["0.23.0.*"]


OWN = {"torch": "2.11.0a0+git.nv", "megatron-core": "0.16.1", "transformers": "5.6.0",
       "math-verify": "0.9.0"}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "engine", "red"),
    [
        ({}, False, []),
        ({}, True, ["vllm is not installed, ==0.23.0 is needed"]),
        ({"vllm": "0.23.0"}, True, []),
        ({"vllm": "0.32.0"}, True, ["vllm 0.32.0, ==0.23.0 is needed"]),
        ({"torch": "2.13.0"}, True, ["vllm is not installed, ==0.32.0 is needed"]),
        ({"megatron-core": "0.12.1"}, False, ["megatron-core 0.12.1, ==0.16.1 is needed"]),
        ({"torch": "2.11.0+cu130"}, False, []),
        ({"torch": "2.12.1+cu130"}, False, []),
        ({"torch": "2.13.0"}, False, []),
        ({"torch": "2.13.0", "vllm": "0.23.0"}, False, []),
        ({"torch": "2.10.0"}, False, ["torch 2.10.0, >=2.11.0a0,<2.14 is needed"]),
        ({"torch": "2.14.0a0+nv"}, False, ["torch 2.14.0a0+nv, >=2.11.0a0,<2.14 is needed"]),
    ],
)
def test_a_machine_with_its_own_torch_trains_without_an_engine(
    changes: dict[str, str], engine: bool, red: list[str]
) -> None:
    facts = Facts(python=(3, 12), packages=OWN | changes)
    assert [row.what for row in pinned_rows(facts, "cuda", read_matrix(), engine=engine)] == red


@pytest.mark.parametrize(
    ("torch", "told", "fix"),
    [
        ("2.11.0+cu130", "==0.23.0 belongs to torch 2.11.0+cu130", "pip install 'vllm==0.23.0'"),
        ("2.11.0a0+git.nv", "==0.23.0 belongs to torch 2.11.0a0", "build vLLM 0.23.0 from source"),
        ("2.12.0", "no set has one for torch 2.12.0", "of the set cuda"),
        ("2.13.0", "==0.32.0 belongs to torch 2.13.0", "pip install 'vllm==0.32.0'"),
    ],
)
def test_the_doctor_notes_a_missing_engine_and_a_run_that_needs_it_is_red(
    torch: str, told: str, fix: str
) -> None:
    matrix = read_matrix()
    packages = OWN | {"torch": torch} | {
        canonical_name(name): specifier.split(",")[0].strip("=>") or "1"
        for name, specifier in matrix["core"].items() if name not in OWN and name != "numpy"
    } | {"numpy": "2.3.5"}  # fmt: skip
    facts = Facts(python=(3, 12), packages=packages)
    rows = [*package_rows(facts, "cuda", matrix, engine=False)]
    assert not [row for row in rows if row.status is Status.RED]
    (missing,) = (row for row in rows if row.status is Status.NOTE)
    assert told in missing.what and fix in missing.fix and "train_rl does not" in missing.what
    assert rows[-1].what.endswith("as versions.cfg says for cuda-trainer")
    red = [row.what for row in package_rows(facts, "cuda", matrix) if row.status is Status.RED]
    assert any("vllm is not installed" in what for what in red)
    other = replace(facts, packages=packages | {"vllm": "0.20.0"})
    for engine in (True, False):
        rows = [*package_rows(other, "cuda", matrix, engine=engine)]
        assert any("vllm 0.20.0" in row.what for row in rows if row.status is Status.RED)


def test_which_runs_have_an_engine() -> None:
    from mindspeed_rl.command_line.arguments import parse

    score = ["--hf-checkpoint", "m", "--tokens", "t", "--output", "o", "--backend"]
    assert has_engine(parse(RLRunConfig, [], "test").config)
    assert not has_engine(parse(PretrainRunConfig, [], "test").config)
    for backend, engine in (("megatron", False), ("engine", True)):
        config = parse(ScoreRunConfig, [*score, backend], "test").config
        assert has_engine(config) == engine


@pytest.mark.parametrize(
    ("installed", "case", "told"),
    [
        ("0.32.0", MOE, ""),
        ("0.32.1", GQA, ""),
        ("0.23.0", GQA, ""),
        ("0.23.0", MOE, "vllm 0.23.0 on cuda: where it keeps experts is known of 0.32.0 only"),
        ("0.24.0", GQA, "where it keeps its weights is known of 0.32.0 and 0.23.0 only"),
    ],
)
def test_the_row_of_cuda_holds_for_both_releases(
    installed: str, case: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name != "vllm":
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(capabilities, "version", version)
    layout = VllmLayout(spec_of(case), EngineLayout(1, 1))
    if told:
        with pytest.raises(UsageError, match=told):
            capabilities.installed_layout(layout, "cuda")
    else:
        assert capabilities.installed_layout(layout, "cuda").spec == layout.spec


@pytest.mark.parametrize(
    ("platform", "fix"),
    [
        ("cpu", r"setup_env\.sh"),
        ("cuda", r"pip install -e '\.\[cuda\]', or '\.\[cuda-torch211\]' beside torch 2\.11"),
        ("npu", "docs/install.md, Ascend NPU"),
    ],
)
def test_the_engine_is_installed_as_its_platform_has_it(
    platform: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script of the CPU installs vLLM for the CPU, which no device runs."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    for version in (missing, lambda name: "0.1.0"):
        monkeypatch.setattr(capabilities, "version", version)
        with pytest.raises(UsageError, match=fix) as refused:
            capabilities.check_installed_engine(platform)
        assert platform == "cpu" or "setup_env" not in str(refused.value)
