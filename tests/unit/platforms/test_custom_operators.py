"""The variable that leads CANN to vLLM-Ascend's compiled operators."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mindspeed_rl.launch import bootstrap
from mindspeed_rl.platforms.custom_operators import VARIABLE, add_custom_operators


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that fails when it is imported."""
    folder = tmp_path / "vllm_ascend"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported before torch_npu')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm_ascend", raising=False)
    return folder


@pytest.mark.parametrize("vendor", ["custom_transformer", "vllm-ascend"])
def test_the_folder_of_the_installed_version_comes_first(package: Path, vendor: str) -> None:
    operators = package / "_cann_ops_custom" / "vendors" / vendor
    operators.mkdir(parents=True)
    environ = {VARIABLE: "/mine:/other"}
    for _ in range(2):
        add_custom_operators(environ)
        assert environ == {VARIABLE: f"{operators}:/mine:/other"}


def test_an_npu_process_has_it_before_torch_is_imported(package: Path) -> None:
    operators = package / "_cann_ops_custom" / "vendors" / "custom_transformer"
    operators.mkdir(parents=True)
    for platform, expected in (("npu", str(operators)), ("cpu", None)):
        environ: dict[str, str] = {}
        bootstrap.set_defaults(platform, environ)
        assert environ.get(VARIABLE) == expected


def test_two_jobs_compile_extensions_in_folders_of_their_own(package: Path) -> None:
    """MindSpeed deletes the folder when it finds a lock; a user's own folder wins."""
    found = []
    for port in ("1", "2", "1"):
        environ = {"MASTER_PORT": port}
        bootstrap.set_defaults("npu", environ)
        found.append(environ["TORCH_EXTENSIONS_DIR"])
    assert found[0] == found[2] != found[1]
    own = {"TORCH_EXTENSIONS_DIR": "/mine"}
    bootstrap.set_defaults("npu", own)
    assert own["TORCH_EXTENSIONS_DIR"] == "/mine"


def test_without_such_operators_nothing_is_set(package: Path) -> None:
    environ: dict[str, str] = {}
    add_custom_operators(environ)
    assert environ == {}
