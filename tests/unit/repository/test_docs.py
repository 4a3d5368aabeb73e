"""The pages of the README and the docs: their blocks can be read, their links lead somewhere.

The commands in them are executed: tests/unit/repository/test_docs_run.py.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.architecture import ROOT
from support.pages import ALL, OTHERS, PAGES, Block


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.name)
def test_it_is_bash(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_chinese_pages_have_the_commands_of_the_english_ones() -> None:
    """Every block of a Chinese page is one of its English page, comments aside; both are linked."""
    chinese = [path for path in PAGES if path.stem.endswith("_zh")]
    assert len(chinese) > 6
    for path in chinese:
        english = f"{path.stem.removesuffix('_zh')}.md"
        known = {block.words for block in ALL if block.page in (english, "first_run.md")}
        for block in ALL:
            assert block.page != path.name or block.words in known, block.name
        assert f"[English]({english})" in path.read_text(encoding="utf-8")
        assert f"[中文]({path.name})" in (path.parent / english).read_text(encoding="utf-8")


def test_data_and_python_in_pages_can_be_read() -> None:
    """Rows of data are JSON, one a line; Python compiles."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for language, body in re.findall(r"```(json|python)\n(.*?)```", text, re.S):
            if language == "python":
                ast.parse(body, filename=path.name)
            else:
                assert all(isinstance(json.loads(line), dict) for line in body.splitlines())


def test_links_between_pages_lead_somewhere() -> None:
    for path in [*PAGES, *OTHERS]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_readme_says_what_each_package_is_for() -> None:
    rows = (ROOT / "README.md").read_text(encoding="utf-8").split("## Where things are")[1]
    packages = {path.parent.name for path in (ROOT / "mindspeed_rl").glob("*/__init__.py")}
    assert packages == set(re.findall(r"`(\w+)/`", rows)) - {"mindspeed_rl"}


def test_every_finding_of_the_ascend_pages_names_tests_that_exist() -> None:
    """Their tables say which test fails without a fix; elsewhere they name files of the package."""
    pages = ("ascend.md", "ascend_internals.md")
    text = "\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in pages)
    rows = list(tables(text, "| finding | fix | test |"))
    assert len(rows) > 30
    usual = ROOT / "tests/ascend/test_engine.py"
    for *_, last in rows:
        named = re.findall(r"`([^`]+)`", last)
        assert named, last
        source = "".join((ROOT / name).read_text() for name in named if name.endswith(".py"))
        for name in named:
            known = f"def {name}(" in source + usual.read_text()
            assert name.endswith(".py") or known, f"{name}: {last}"
    for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|toml|sh|cfg))`", text):
        assert (ROOT / name).is_file() or (ROOT / "mindspeed_rl" / name).is_file(), name


def tables(text: str, header: str) -> Iterator[list[str]]:
    """The cells of the rows of all tables with this header."""
    for part in text.split(header)[1:]:
        for line in part.partition("\n\n")[0].splitlines()[2:]:
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the section dev of versions.cfg has it")
    pytest.importorskip("myst_parser", reason="the section dev of versions.cfg has it")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs",
         str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "quickstart_zh.html").is_file() and (tmp_path / "flags.html").is_file()
