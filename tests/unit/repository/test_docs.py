"""The pages of the README and the docs: their blocks can be read, their links lead somewhere.

The commands in them are executed: tests/unit/repository/test_docs_run.py.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.architecture import ROOT
from support.pages import ALL, OTHERS, PAGES, Block


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.name)
def test_it_is_bash(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
