"""Every command in the README and the docs is proper bash; those that are not run are parsed.

The others run: tests/unit/test_docs_run.py. Other tests look closer at single pages.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import groupby, takewhile
from pathlib import Path

import pytest
from support.architecture import ROOT
from support.pages import ALL, BLOCK, PAGES, ROOMS, Block, Run
from support.recipes import RECIPES, SCRIPTS, recipe_flags

from mindspeed_rl.arguments import ENTRIES, own_flags, parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.conversion.options import parse_options
from mindspeed_rl.versions import mindspeed_branch, read_matrix

sys.path.insert(0, str(ROOT / "tools"))

from practice_map import PRACTICES, Grade

INLINE = re.compile(r"`((?:[A-Z0-9_]+=\S+ )*(?:python|bash|torchrun|pytest|pip) [^`]+)`")
# Their commands are not ours to check.
OTHERS = frozenset(
    {"pip", "git", "docker", "ray", "export", "source", "python3.11", "cat", "cd", "printf"}
    | {"for", "do", "done", "tests/ascend/run.sh"}
)
ENVIRONMENT = re.compile(r"^[A-Z_][A-Z0-9_]*=")


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.name)
def test_it_is_bash(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- all others


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a block as words, variables in front included, arrays left out."""
    text = re.sub(r"^\w+=\((?:[^()]|\([^()]*\))*?\)$", "", text, flags=re.M | re.S)
    text = text.replace("\\\n", " ")
    for line in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line)
        for part in re.split(r"\s*(?:&&|\|\||;)\s*", line):
            if words := shlex.split(part):
                yield words


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
        known = module in ("sphinx", "pytest", "json.tool") or find_spec(module)
        assert known, f"{where}: unknown module {module}"
        check_paths([w for w in words if w.startswith("tests/")], where)
        return
    if "--help" in words or any("[@]" in word for word in words):
        words = [w for w in words if "[@]" not in w and w != "--help"]
    words = [w for w in words if w not in ("...", "#")]
    parse(ENTRIES[module], words, module)


def check_paths(patterns: Sequence[str], where: str) -> None:
    for pattern in patterns:
        assert list(ROOT.glob(pattern)), f"{where}: there is no {pattern}"


@cache
def variables_of_scripts() -> frozenset[str]:
    """Variables of the environment that some script reads."""
    texts = [path.read_text() for path in SCRIPTS.rglob("*.sh")]
    return frozenset(name for text in texts for name in re.findall(r"\$\{([A-Z0-9_]+):[-?]", text))


def check_recipe(
    script: str, words: list[str], variables: tuple[tuple[str, str], ...], where: str
) -> None:
    path = ROOT / "pretrain_scripts" / Path(script).name
    assert path.is_file(), f"{where}: no such script {script}"
    for name, _ in variables:
        assert name in variables_of_scripts(), f"{where}: no script reads {name}"
    if path.name in RECIPES:
        extra = [w for w in words if w != "--doctor"]
        parse(RLRunConfig, [*recipe_flags(path.name, *variables), *extra], where)
        return
    known = path.read_text()
    own = [w for w in words if w.startswith("--")]
    spelled = {s for _, flags in own_flags(RLRunConfig) for flag in flags for s in flag.spellings}
    for word in own:
        assert word in known or word in spelled, f"{where}: {path.name} has no {word}"


def check(words: list[str], where: str) -> None:
    """One command of ours: what it names must be there."""
    given = list(takewhile(ENVIRONMENT.match, words))
    variables = tuple((w.partition("=")[0], w.partition("=")[2]) for w in given)
    words = words[len(given) :]
    if not words:
        return
    head = words[0]
    if head == "pip":
        check_extras(words, where)
    elif head == "pytest":
        check_paths([w for w in words[1:] if not w.startswith("-")], where)
    elif head == "torchrun":
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
            check_recipe(script, words[2:], variables, where)
        else:
            assert (ROOT / script).is_file(), f"{where}: no such script {script}"
            own = [w for w in words[2:] if w.startswith("--")]
            assert all(w in (ROOT / script).read_text() for w in own), f"{where}: {own}"
            check_paths([w for w in words[2:] if not w.startswith("-")], where)
    else:
        known = head in OTHERS or head.startswith(("DEVICES", "IMAGE", '"$', "./"))
        assert known, f"{where}: nothing here can check {head!r}; mark the block, or add to OTHERS"


def check_extras(words: Sequence[str], where: str) -> None:
    """Of this package: ``pip install -e '.[npu]'``."""
    for extra in re.findall(r"^\.\[(\w+)\]$", "\n".join(words), re.M):
        assert extra in read_matrix(), f"{where}: no section {extra} in versions.cfg"


@pytest.mark.parametrize(
    "block", [b for b in ALL if b.run is Run.NEVER], ids=lambda block: block.name
)
def test_commands_of_blocks_that_are_not_run_are_accepted(block: Block) -> None:
    for words in commands(block.text):
        check(words, block.name)


@pytest.mark.parametrize("path", [*PAGES, *ROOMS], ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_within_sentences_are_accepted(path: Path) -> None:
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    for found in INLINE.finditer(text):
        for words in commands(" ".join(found[1].split())):
            check(words, f"{path.name}: {found[1]}")


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
    for path in [*PAGES, *ROOMS]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def tables(text: str) -> Iterator[list[list[str]]]:
    """The rows of each table as cells, the row of dashes included; blocks of code have none."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    begins = ("| ", "|-", "|:")  # a sentence may begin with |x|
    for inside, lines in groupby(text.splitlines(), lambda line: line.lstrip().startswith(begins)):
        if inside:
            yield [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in lines]


@pytest.mark.parametrize("path", [*PAGES, *ROOMS], ids=lambda path: str(path.relative_to(ROOT)))
def test_rows_of_a_table_have_equally_many_cells(path: Path) -> None:
    for rows in tables(path.read_text(encoding="utf-8")):
        where = f"{path.name}: |{'|'.join(rows[0])}|"
        assert len(rows) > 1 and all(re.fullmatch(r"\s*:?-+:?\s*", c) for c in rows[1]), where
        assert [len(row) for row in rows] == [len(rows[0])] * len(rows), where


def test_a_table_with_a_cell_too_few_is_found() -> None:
    text = "a | b\n\n| a | b \\| c |\n|---|\n| 1 | 2 |\n\n```bash\n| x |\n```\n"
    assert [[len(row) for row in rows] for rows in tables(text)] == [[2, 1, 2]]


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
    text = (ROOT / "docs" / "install.md").read_text()
    matrix = read_matrix()
    for section in ("npu", "npu.no-deps", "npu.system"):
        for name, specifier in matrix[section].items():
            assert specifier.removeprefix("==") in text, f"{name}{specifier}"


def test_all_pages_and_tools_name_one_branch_of_mindspeed() -> None:
    """It belongs to one version of megatron-core; which, the matrix says (R52)."""
    folders = ("mindspeed_rl", "docs", "tests", "tools", "pretrain_scripts")
    files = [ROOT / "README.md", *(p for f in folders for p in (ROOT / f).rglob("*.*"))]
    texts = {p: p.read_text() for p in files if p.suffix in (".py", ".md", ".sh", ".json")}
    found = {p: set(re.findall(r"core_r\d+(?:\.\d+)+", text)) for p, text in texts.items()}
    own = ROOT / "tests/unit/test_doctor.py"  # has others, which are red
    wrong = {p: names for p, names in found.items() if names - {mindspeed_branch()} and p != own}
    assert not wrong and any(found.values())
    sources = [p for p in (ROOT / "mindspeed_rl").rglob("*.py") if found[p]]
    assert not sources, "versions.cfg has it"
