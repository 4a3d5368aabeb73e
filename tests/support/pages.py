"""The blocks of bash and of Python in the README and the docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from support.architecture import ROOT


class Run(Enum):
    """How a block is executed."""

    NEVER = 0
    FILLED_IN = 1  # with the reader's own paths and flags
    AS_IT_STANDS = 2


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [
    *sorted((ROOT / "mindspeed_rl").glob("*/README.md")),
    *(ROOT / name for name in ("tests/ascend/README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
PYTHON = re.compile(r"^```python\n(# (?P<path>[\w./]+\.py)\n.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^(?P<indent> *)```bash\n(?P<body>.*?)^ *```", re.MULTILINE | re.DOTALL)
_MARK = "<!-- executed -->"

# Blocks that tests/unit/repository/test_docs_run.py does not run: how they begin, and why.
NOT_RUN = {
    "bash pretrain_scripts/quickstart.sh": "minutes; tests/e2e/test_quickstart.py runs it",
    "bash tests/run_tests.sh": "the suite itself",
    "bash pretrain_scripts/setup_env.sh ": "installs; tests/run_tests.sh runs it",
    "tests/ascend/run.sh": "part of the suite; with MindSpeed only by hand",
    "python -m pytest": "parts of the suite",
    "python tools/bench/reshard.py": "minutes that need a quiet machine, by hand",
    "python tools/soak.py": "minutes; tests/e2e/test_soak.py runs it",
    "pip wheel": "installs; test_package.py does so in a fresh environment",
    "IMAGE=": "docker, and a device",
    "#!/bin/bash\n#SBATCH": "needs Slurm; test_slurm_script.py has a stand-in for it",
    "bash tools/device_check.sh": "minutes; tests/e2e/test_device_check.py runs it",
    "SOC_VERSION=": "compiles a package of others with CANN",
}


@dataclass(frozen=True)
class Block:
    """One block of bash in a page."""

    page: str
    line: int
    text: str
    run: Run

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def quick(self) -> bool:
        """Whether it is run in the first tier: blocks of the README that take seconds."""
        return self.page == "README.md" and "mindspeed_rl.score" not in self.text

    @property
    def words(self) -> str:
        """Without comments and breaks of lines: what makes two blocks the same."""
        return " ".join(re.sub(r"(^|\s)#.*|\\$", "", self.text, flags=re.M).split())


def blocks() -> Iterator[Block]:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            before = text[: found.start()].rstrip().rsplit("\n", 1)[-1].strip()
            indent = len(found["indent"])
            body = "".join(line[indent:] for line in found["body"].splitlines(keepends=True))
            line = text[: found.start()].count("\n") + 1
            left_out = body.startswith(tuple(NOT_RUN))
            run = Run.NEVER if left_out else Run.FILLED_IN
            run = Run.AS_IT_STANDS if before == _MARK else run
            yield Block(path.name, line, body, run)


def python_files(page: str) -> dict[str, str]:
    """The blocks of Python of a page that are files: the first line of each is its path."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return {found["path"]: found[1] for found in PYTHON.finditer(text)}


ALL = list(blocks())
