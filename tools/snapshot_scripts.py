"""Writes what published pretraining and tuning scripts pass: flags and values, no text.

    python tools/snapshot_scripts.py --mindspeed-llm ~/MindSpeed-LLM --mindspeed ~/MindSpeed

Each script runs in a restricted bash in which ``torchrun`` and ``python`` note their arguments and
nothing else can be started. Places that a user has to fill in become ``PATH``. The tests read the
result without a checkout.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

OUTPUT = Path(__file__).resolve().parents[1] / "tests/support/published_scripts.json"
PLACE = "PATH"
# A variable whose value is a place: words in quotes that ask for one, or a path.
_PLACES = re.compile(r"""^(\w+)=(["']?)(?:your\b|<|\.{0,2}/)[^\n]*$""", re.MULTILINE)
_PATH_LIKE = re.compile(r"^\.{0,2}/")
_STARTS = re.compile(r"\.py$|^-m$")
_NOTE = '{ printf "%s\\0" "$@"; printf "\\1"; } >&3'
_PRELUDE = f"""
torchrun() {{ {_NOTE}; }}
python() {{ {_NOTE}; }}
python3() {{ {_NOTE}; }}
tee() {{ :; }}
PATH=
set -r
"""


@dataclass(frozen=True)
class ScriptFolders:
    """Scripts of one repository.

    Attributes:
        name: Name of the repository.
        option: Option of this tool that gives its checkout.
        patterns: Where its scripts for families of this project are.
    """

    name: str
    option: str
    patterns: tuple[str, ...]


SOURCES = (
    ScriptFolders(
        "Ascend/MindSpeed-LLM",
        "mindspeed_llm",
        tuple(
            f"examples/mcore/{family}/{kind}"
            for family in ("deepseek3", "llama2", "qwen25", "qwen3", "qwen3_moe")
            for kind in ("pretrain_*.sh", "tune_*full*.sh")
        ),
    ),
    ScriptFolders(
        "Ascend/MindSpeed",
        "mindspeed",
        tuple(
            f"tests_extend/model_tests/{folder}/pretrain_llama*.sh"
            for folder in ("benchmark_model/llama2", "mfu_model", "perf_model/llama2")
        ),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the scripts of both checkouts and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for source in SOURCES:
        parser.add_argument(f"--{source.option.replace('_', '-')}", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(argv)
    found = [(source, Path(getattr(options, source.option))) for source in SOURCES]
    options.output.write_text(snapshot(found), encoding="utf-8")
    print(f"wrote {options.output}")
    return 0


def snapshot(checkouts: Sequence[tuple[ScriptFolders, Path]]) -> str:
    """Return the text of the file: a line per script, sorted."""
    blocks = []
    for source, checkout in checkouts:
        commit = subprocess.run(
            ["git", "-C", str(checkout), "rev-parse", "HEAD"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        rows = [
            f"  {json.dumps(str(path.relative_to(checkout)))}: {json.dumps(read_script(path))}"
            for path in scripts_in(source, checkout)
        ]
        head = f'"repository": {json.dumps(source.name)}, "commit": {json.dumps(commit)}'
        blocks.append("{" + head + ', "scripts": {\n' + ",\n".join(rows) + "\n}}")
    return "[" + ",\n".join(blocks) + "]\n"


def scripts_in(source: ScriptFolders, checkout: Path) -> Iterator[Path]:
    """Yield the scripts of a repository in the order of their paths."""
    yield from sorted({path for pattern in source.patterns for path in checkout.glob(pattern)})


def read_script(path: Path) -> dict[str, object]:
    """Return the number of ranks of a script, and its flags with their values.

    Raises:
        SystemExit: The script starts nothing, or more than one thing.
    """
    calls = [
        call for call in run(path.read_text(encoding="utf-8")) if any(map(_STARTS.search, call))
    ]
    if len(calls) != 1:
        sys.exit(f"{path}: {len(calls)} commands start a Python file; expected one")
    (words,) = calls
    entry = next(i for i, word in enumerate(words) if word.endswith(".py"))
    launcher = as_flags(word.replace("_", "-") for word in words[:entry])
    ranks = int(launcher["--nproc-per-node"][0]) * int(launcher["--nnodes"][0])
    return {"ranks": ranks, "flags": as_flags(words[entry + 1 :])}


def run(text: str) -> list[list[str]]:
    """Run a script and return the arguments of every command that it would start."""
    text = _PLACES.sub(rf"\1={PLACE}", text)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as record:
        command = ["bash", "-c", f"exec 3>&{record.fileno()}\n{_PRELUDE}{text}"]
        subprocess.run(
            command, cwd=folder, env={}, pass_fds=[record.fileno()],
            capture_output=True, timeout=30, check=False,
        )  # fmt: skip
        record.seek(0)
        calls = record.read().decode().split("\1")[:-1]
    return [call.split("\0")[:-1] for call in calls]


def as_flags(words: Iterator[str] | Sequence[str]) -> dict[str, list[str]]:
    """Return the flags of a command line with their values; of a repeated flag the last."""
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, attached = word.partition("=")
            flags.pop(name, None)
            flags[name] = [attached] if attached else []
        elif name:
            flags[name].append(PLACE if _PATH_LIKE.search(word) else word)
    return dict(sorted(flags.items()))


if __name__ == "__main__":
    sys.exit(main())
