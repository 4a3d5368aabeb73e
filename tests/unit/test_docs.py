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
from itertools import takewhile
from pathlib import Path

import pytest
from support.architecture import ROOT
from support.pages import ALL, PAGES, ROOMS, Block, Run
from support.recipes import RECIPES, SCRIPTS, recipe_flags

from mindspeed_rl.arguments import ENTRIES, own_flags, parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.conversion.options import parse_options
from mindspeed_rl.versions import read_matrix

sys.path.insert(0, str(ROOT / "tools"))


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
