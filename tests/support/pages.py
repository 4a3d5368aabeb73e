"""The blocks of bash in the README and the docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from support.architecture import ROOT


class Run(Enum):
    """When a block is executed."""

    NEVER = 0
    IN_TURNS = 1
    ALWAYS = 2


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = [*sorted((ROOT / "mindspeed_rl").glob("*/README.md")), ROOT / "tests/ascend/README.md"]
BLOCK = re.compile(r"^(?P<indent> *)```bash\n(?P<body>.*?)^ *```", re.MULTILINE | re.DOTALL)
_MARKS = {"<!-- executed -->": Run.ALWAYS, "<!-- executed in turns -->": Run.IN_TURNS}


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
            yield Block(path.name, line, body, _MARKS.get(before, Run.NEVER))


ALL = list(blocks())
