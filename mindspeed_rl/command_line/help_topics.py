"""``--help``: an index of topics, and what is said of a topic that does not exist."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

ALL = "all"
"""Topic of all flags."""
_ASKED = ("-h", "--help")


def asked_topic(argv: Sequence[str]) -> str | None:
    """Return the word behind ``--help``, empty where there is none; ``None``: no help. Pure."""
    at = next((i for i, word in enumerate(argv) if word in _ASKED), None)
    if at is None:
        return None
    return argv[at + 1] if at + 1 < len(argv) else ""


def index(usage: str, about: str, titles: Mapping[str, str], prog: str, columns: int) -> str:
    """Return the text of ``--help`` alone: what the entry does, and its topics. Pure.

    Args:
        usage: Command line in short.
        about: Description of the entry.
        titles: Title of each topic.
        prog: Name of the entry's module.
        columns: Width of the text.
    """
    wide = max(map(len, titles)) + 2
    lines = [
        *(usage, "", about, ""),
        *("help by topic:", ""),
        *(f"  {name.ljust(wide)}{title}" for name, title in titles.items()),
        f"  {ALL.ljust(wide)}All flags",
        "",
    ]
    first = next(iter(titles))
    told = (
        f"python -m {prog} --help {first} prints the flags of a topic, --help --lr those of a "
        "flag, and --help all everything; docs/flags.md has the same tables. Flags of Megatron-LM "
        "and MindSpeed that change nothing here are accepted, too."
    )
    return "\n".join(lines) + "\n" + textwrap.fill(told, columns, break_on_hyphens=False)


def unknown_topic(topic: str, topics: Collection[str], flags: Collection[str]) -> str:
    """Return the sentence about a topic that does not exist. Pure.

    Args:
        topic: The word behind ``--help``.
        topics: Names of all topics.
        flags: All flags of the entry.
    """
    near = [name for name in topics if topic in name] or get_close_matches(topic, topics, n=1)
    near = near or get_close_matches(f"--{topic.lstrip('-')}", flags, n=3)
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    return f"--help {topic}: no topic or flag of this entry{meant}; topics: {', '.join(topics)}"


def print_for_pager(text: str) -> None:
    """Print a text; a reader that ends earlier, like ``head``, is no error. Local."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python would flush it once more when it ends, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
