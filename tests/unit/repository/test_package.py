"""A wheel brings the commands, and with `mindspeed-rl recipes` the recipes and tools."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.architecture import ROOT

from mindspeed_rl.core import shipped

TRACKED = ("git", "ls-files", "pretrain_scripts", "tools")


def run(
    *words: object, path: str = os.environ["PATH"], folder: Path = ROOT, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that finds no package of this checkout."""
    left_out = ("PYTHONPATH", "PYTHON", "PIP_INDEX_URL")
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    return subprocess.run(
        [str(word) for word in words], cwd=folder, env=environ | {"PATH": path} | more,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def passed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of a fresh environment with the wheel, beside the packages that it needs."""
    folder = tmp_path_factory.mktemp("package")
    checkout = folder / "checkout"
    passed(run("git", "clone", "-q", "--no-local", "--depth", "1", ROOT, checkout))
    for name in passed(run("git", "ls-files", "-m", "-o", "--exclude-standard")).split():
        if (ROOT / name).is_file() and name != ".venv":  # what is not committed yet
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            (checkout / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "-q")
    offline = ("--no-deps", "--no-index")
    passed(run(*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, ".", folder=checkout))
    (wheel,) = folder.glob("*.whl")
    fresh = folder / "environment"
    passed(run(sys.executable, "-m", "venv", "--without-pip", fresh))
    python = fresh / "bin/python"
    passed(run(sys.executable, "-m", "pip", "--python", python, "-q", "install", *offline, wheel))
    describe = ("git", "describe", "--always", "--dirty", "--abbrev=40")
    (folder / "commit").write_text(passed(run(*describe, folder=checkout)))
    (site,) = fresh.glob("lib/python*/site-packages")
    # behind the wheel, and without the links of editable installations in it
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return fresh / "bin"


@pytest.fixture(scope="module")
def written(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the installed command writes."""
    target = tmp_path_factory.mktemp("mine") / "rl"
    told = passed(run(installed / "mindspeed-rl", "recipes", target, folder=target.parent))
    assert f"files in {target}" in told
    return target


pytestmark = pytest.mark.slow


def test_everything_but_the_tools_of_authors_is_written(written: Path) -> None:
    tracked = set(passed(run(*TRACKED)).split())
    found = {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()}
    assert tracked - found == {f"tools/{name}" for name in shipped.OF_AUTHORS}
    assert found <= tracked
    for name in found:
        assert (written / name).read_bytes() == (ROOT / name).read_bytes()
        assert os.access(written / name, os.X_OK) == name.endswith(".sh"), name


def test_the_written_recipes_run_with_the_installed_package(
    installed: Path, written: Path, tmp_path: Path
) -> None:
    """From another folder: they find each other, the model's config and the package."""
    path = f"{installed}:{os.environ['PATH']}"
    which = run("python3", "-c", "import mindspeed_rl as m; print(m.__file__)", path=path,
                folder=tmp_path)  # fmt: skip
    assert Path(passed(which)).is_relative_to(installed.parent)
    scripts = written / "pretrain_scripts"
    dry = run("bash", scripts / "grpo_qwen3_30b_a3b_1node.sh", "--rl-dry-run", path=path,
              folder=tmp_path, MACHINE="a3")  # fmt: skip
    assert "fits" in passed(dry)
    assert str(scripts / "models/configs/qwen3-30b-a3b.json") in dry.stderr
    quick = run("bash", scripts / "quickstart.sh", "--rl-dry-run", path=path, folder=tmp_path)
    assert "memory" in passed(quick)
    assert (written / "outputs/quickstart/seed0/model/config.json").is_file()
    assert not any(tmp_path.iterdir())


def test_a_run_of_the_wheel_knows_its_commit(installed: Path) -> None:
    """Not that of a repository in which the environment happens to lie."""
    passed(run("git", "init", "-q", installed.parent))
    code = "from mindspeed_rl.metrics.run_record import package_commit as c; print(c())"
    told = passed(run(installed / "python", "-c", code, folder=installed))
    assert told == (installed.parents[1] / "commit").read_text() and len(told) > 40


def test_the_written_tools_run_with_the_installed_package(
    installed: Path, written: Path, tmp_path: Path
) -> None:
    path = f"{installed}:{os.environ['PATH']}"
    tools = written / "tools"
    rows = tmp_path / "rows.jsonl"
    passed(run("python", tools / "make_task_data.py", "--task", "digit_sort", "--num-rows", "3",
               "--output", rows, path=path, folder=tmp_path))  # fmt: skip
    assert len(rows.read_text().splitlines()) == 3
    helps = sorted(path.name for path in tools.glob("*.py") if "__main__" in path.read_text())
    assert "convert_checkpoint.py" in helps and "plot_run.py" in helps
    for name in helps:
        told = passed(run("python", tools / name, "--help", path=path, folder=tmp_path))
        assert "usage" in told.lower(), name
    check = run("bash", tools / "device_check.sh", "--help", path=path, folder=tmp_path)
    assert "--stages" in passed(check)


def test_scripts_without_the_package_say_so(written: Path, tmp_path: Path) -> None:
    """The python on PATH is one that has no such package."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text(f'#!/bin/sh\nexec {sys.base_prefix}/bin/python3 -S "$@"')
    (tmp_path / "bin/python3").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = run("bash", written / "pretrain_scripts/quickstart.sh", path=path, folder=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert re.search(r"python3 does not have the package mindspeed_rl; activate", done.stderr)


def test_nothing_is_replaced(installed: Path, written: Path) -> None:
    before = {path: path.read_bytes() for path in written.rglob("*.sh")}
    done = run(installed / "mindspeed-rl", "recipes", written)
    assert done.returncode == 2 and "exists; give a folder without it" in done.stderr
    assert before == {path: path.read_bytes() for path in written.rglob("*.sh")}


def test_the_list_names_scripts_with_what_they_do(installed: Path) -> None:
    told = passed(run(installed / "mindspeed-rl", "recipes")).splitlines()
    assert any(
        re.match(r"pretrain_scripts/grpo_qwen2_5_7b_1node.sh +GRPO of Qwen", t) for t in told
    )
    assert any(re.match(r"tools/convert_checkpoint.py +Converts", line) for line in told)
    assert not any("launch.sh" in line or "soak.py" in line for line in told)
