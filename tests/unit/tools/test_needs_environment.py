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
    for path in sorted([*TOOLS.glob("*.py"), *TOOLS.glob("bench/*.py")])
    if re.search("^from (mindspeed_rl|bench)", path.read_text(), re.MULTILINE)
    and '__name__ == "__main__"' in path.read_text()
]


@pytest.mark.parametrize(
    "name", ["plot_run", "rollouts_page", "prepare_data", "bench/gae", "bench/reshard"]
)
def test_a_tool_without_the_environment_ends_with_one_line(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(TOOLS / f"{name}.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert ".venv/bin/activate" in line and "setup_env.sh" in line and f"{name}.py" in line


def test_the_device_check_without_the_environment_ends_with_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "device_check"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(TOOLS)},
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert ".venv/bin/activate" in line and "device_check" in line


@pytest.mark.parametrize("tool", IMPORTS, ids=lambda path: str(path.relative_to(TOOLS)))
def test_every_tool_asks_for_the_environment_before_it_imports_the_package(tool: Path) -> None:
    text = tool.read_text()
    asks = text.find("\nimport needs_environment")
    needs_it = re.search(r"^(from|import) (mindspeed_rl|bench|torch|numpy)\b", text, re.MULTILINE)
    assert needs_it is not None and 0 < asks < needs_it.start()
