"""Every command in the README and the docs: executed, parsed, or at least proper bash.

docs/index.md says how a block is marked. Other tests look closer at single pages.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from support.recipes import RECIPES, recipe_flags

from mindspeed_rl.arguments import ENTRIES, own_flags, parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.conversion.options import parse_options

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from practice_map import PRACTICES, Grade  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = "<!-- executed -->"
BLOCK = re.compile(r"^(?P<indent> *)```bash\n(?P<body>.*?)^ *```", re.MULTILINE | re.DOTALL)
# Their commands are not ours to check.
OTHERS = frozenset(
    {"pip", "git", "docker", "ray", "export", "source", "python3.11", "cat", "cd", "printf"}
    | {"for", "do", "done", "tests/ascend/run.sh"}
)
ENVIRONMENT = re.compile(r"^[A-Z_][A-Z0-9_]*=")


@dataclass(frozen=True)
class Block:
    """One block of bash in a page."""

    page: str
    line: int
    text: str
    executed: bool

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            before = text[: found.start()].rstrip().rsplit("\n", 1)[-1].strip()
            indent = len(found["indent"])
            body = "".join(line[indent:] for line in found["body"].splitlines(keepends=True))
            line = text[: found.start()].count("\n") + 1
            yield Block(path.name, line, body, before == MARK)


ALL = list(blocks())


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.name)
def test_it_is_bash(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a reader in an environment that is installed: python is ours."""
    folder = tmp_path_factory.mktemp("bin")
    python = folder / "python"  # no link: a virtual environment is found beside its interpreter
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": os.environ.get("HOME", "/"),
    }  # fmt: skip


@pytest.mark.parametrize("block", [b for b in ALL if b.executed], ids=lambda block: block.name)
def test_blocks_that_are_marked_run(block: Block, reader: dict[str, str], tmp_path: Path) -> None:
    for name in ("pretrain_scripts", "tools", "docs", "mindspeed_rl", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=tmp_path, env=reader, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_some_blocks_are_executed() -> None:
    assert len([b for b in ALL if b.executed]) >= 4


# ---- all others


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a block as words, arrays left out."""
    text = re.sub(r"^\w+=\((?:[^()]|\([^()]*\))*?\)$", "", block.text, flags=re.M | re.S)
    text = text.replace("\\\n", " ")
    for line in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line)
        for part in re.split(r"\s*(?:&&|\|\||;)\s*", line):
            words = shlex.split(part)
            while words and ENVIRONMENT.match(words[0]):
                words = words[1:]
            if words:
                yield words


def arrays(block: Block) -> Iterator[tuple[str, list[str]]]:
    for name in re.findall(r"^(\w+)=\(", block.text, re.M):
        definition = re.search(rf"^{name}=\((?:[^()]|\([^()]*\))*?\)$", block.text, re.M | re.S)
        assert definition, f"{block.name}: cannot read {name}"
        script = f'{definition[0]}\nprintf "%s\\n" "${{{name}[@]}}"'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        yield name, done.stdout.splitlines()


@cache
def flags_of_tool(tool: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / tool), "--help"], capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.stdout


def check_entry(module: str, words: list[str], where: str) -> None:
    """Flags of ``python -m module``."""
    if module == "mindspeed_rl.doctor":
        words = [w for w in words if w != "..."]
        parse(RLRunConfig, words, module)
        return
    if module not in ENTRIES:
        assert module in ("sphinx", "pytest", "json.tool"), f"{where}: unknown module {module}"
        return
    if "--help" in words or any("[@]" in word for word in words):
        words = [w for w in words if "[@]" not in w and w != "--help"]
    words = [w for w in words if w not in ("...", "#")]
    parse(ENTRIES[module], words, module)


def check_recipe(script: str, words: list[str], where: str) -> None:
    path = ROOT / "pretrain_scripts" / Path(script).name
    assert path.is_file(), f"{where}: no such script {script}"
    if path.name in RECIPES:
        extra = [w for w in words if w != "--doctor"]
        parse(RLRunConfig, [*recipe_flags(path.name), *extra], where)
        return
    known = path.read_text()
    own = [w for w in words if w.startswith("--")]
    spelled = {s for _, flags in own_flags(RLRunConfig) for flag in flags for s in flag.spellings}
    for word in own:
        assert word in known or word in spelled, f"{where}: {path.name} has no {word}"


def check(words: list[str], where: str) -> None:
    """One command of ours: what it names must be there."""
    head = words[0]
    if head == "torchrun":
        module = words[words.index("-m") + 1]
        check_entry(module, words[words.index("-m") + 2 :], where)
    elif head == "python" and words[1] == "-m":
        check_entry(words[2], words[3:], where)
    elif head == "python":
        assert (ROOT / words[1]).is_file(), f"{where}: no such file {words[1]}"
        if words[1] == "tools/convert_checkpoint.py":
            parse_options(words[2:])
            return
        source = (ROOT / words[1]).read_text()
        for word in words[2:]:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in source:
                assert name in flags_of_tool(words[1]), f"{where}: {words[1]} has no {name}"
    elif head == "bash":
        script = words[1]
        if "<" in script:
            return
        if script.startswith("pretrain_scripts/"):
            check_recipe(script, words[2:], where)
        else:
            assert (ROOT / script).is_file(), f"{where}: no such script {script}"
    else:
        known = head in OTHERS or head.startswith(("DEVICES", "IMAGE", '"$', "./"))
        assert known, f"{where}: nothing here can check {head!r}; mark the block, or add to OTHERS"


@pytest.mark.parametrize("block", [b for b in ALL if not b.executed], ids=lambda block: block.name)
def test_commands_and_arrays_of_flags_are_accepted(block: Block) -> None:
    for words in commands(block):
        check(words, block.name)
    for name, words in arrays(block):
        if name.endswith("_ARGS") and name != "CONVERT_ARGS":
            parse(RLRunConfig, words, f"{block.name} {name}")


def test_links_between_pages_lead_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_flags_that_pages_name_exist() -> None:
    """Of the migration tables and the practices: our column only."""
    from mindspeed_rl.compat import foreign_flags

    spelled = {
        spelling
        for run_type in ENTRIES.values()
        for _, flags in own_flags(run_type)
        for flag in flags
        for spelling in flag.spellings
    } | set(foreign_flags())
    for page in ("migration.md", "practices.md", "mismatch.md", "logging.md"):
        text = (ROOT / "docs" / page).read_text()
        for row in text.splitlines():
            ours = row.split("|")[-2] if page == "migration.md" and row.startswith("|") else row
            for flag in re.findall(r"`(--[a-z0-9-]+[a-z0-9])(?=[ `])", ours):
                if flag.startswith("--vllm-") or flag in ("--doctor", "--dev"):
                    continue
                assert flag in spelled, f"{page}: no flag {flag}"


# ---- the map of practices


def test_every_practice_names_code_and_a_test_that_exist() -> None:
    for practice in PRACTICES:
        if practice.grade is not Grade.ABSENT:
            assert practice.code and practice.test, practice.theirs
        assert not practice.code or (ROOT / "mindspeed_rl" / practice.code).is_file(), practice.code
        if practice.test:
            file, _, name = practice.test.partition("::")
            tree = ast.parse((ROOT / file).read_text())
            names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in names, practice.test


def test_the_page_of_practices_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "tools/practice_map.py", "--check"], cwd=ROOT, capture_output=True,
        text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# ---- the generator


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


def test_installation_pages_say_what_the_matrix_says() -> None:
    from mindspeed_rl.versions import read_matrix

    text = (ROOT / "docs" / "install.md").read_text()
    matrix = read_matrix()
    for section in ("npu", "npu.no-deps", "npu.system"):
        for name, specifier in matrix[section].items():
            assert specifier.removeprefix("==") in text, f"{name}{specifier}"
