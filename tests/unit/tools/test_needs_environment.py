"""A tool without the environment says in one line where to get it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"
IMPORTS = [
    path
    for path in sorted(TOOLS.glob("*.py"))
    if re.search("^from mindspeed_rl", path.read_text(), re.MULTILINE)
    and "__main__" in path.read_text()
]


@pytest.mark.parametrize("name", ["plot_run", "rollouts_page", "prepare_data"])
def test_a_tool_without_the_environment_ends_with_one_line(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(TOOLS / f"{name}.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert ".venv/bin/activate" in line and "setup_env.sh" in line and f"{name}.py" in line


@pytest.mark.parametrize("tool", IMPORTS, ids=lambda path: path.stem)
def test_every_tool_asks_for_the_environment_before_it_imports_the_package(tool: Path) -> None:
    text = tool.read_text()
    asks = text.find("\nimport needs_environment")
    assert 0 < asks < text.find("\nfrom mindspeed_rl")
