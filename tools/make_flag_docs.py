"""Writes docs/flags.md from the configuration: python tools/make_flag_docs.py [--check]."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from mindspeed_rl.compat import Disposition, ForeignFlag, foreign_flags
from mindspeed_rl.config.arguments import ENTRIES, OwnFlag, own_flags
from mindspeed_rl.config.engine_options import as_flag
from mindspeed_rl.rollout.vllm.options import RESERVED

TARGET = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
HEAD = """\
# Flags

Written by `python tools/make_flag_docs.py` from `mindspeed_rl/config` and `mindspeed_rl/compat`;
edit those. `--help` of an entry says the same in the terminal.
"""
OPTIONS_HEAD = (
    "## Refused --vllm-* options (train_rl)\n\n| why, or what to use | options |\n|---|---|"
)
FOREIGN_HEAD = """\
## Flags of Megatron-LM, MindSpeed and MindSpeed-LLM

A script may pass every flag below. Those that are flags of the entry are in the tables above; an
entry's own flag wins over a row below. `_` and `-` are the same. A value in brackets is accepted
although the flag is refused, because it asks for what happens anyway.
"""
TITLES = {
    Disposition.COMPARED: "Compared with the model",
    Disposition.ACCEPTED: "Accepted without effect, named once at start",
    Disposition.REFUSED: "Refused, with the fix",
}


def own_rows() -> Iterator[str]:
    """One table per section; a section that both entries share is printed once."""
    entries_of: dict[type, list[str]] = defaultdict(list)
    flags_of: dict[type, list[OwnFlag]] = {}
    for prog, run_type in ENTRIES.items():
        for section, flags in own_flags(run_type):
            entries_of[section].append(prog.rpartition(".")[2])
            flags_of[section] = flags
    for section, flags in flags_of.items():
        title, _, text = (inspect.getdoc(section) or "").replace("``", "`").partition("\n")
        yield f"## {title.rstrip('.')} ({', '.join(entries_of[section])})\n"
        yield f"{text.strip()}\n"
        yield "| flag | what it does |\n|---|---|"
        for flag in flags:
            choices = f" {{{', '.join(flag.info.choices)}}}" if flag.info.choices else ""
            names = ", ".join(f"`{name}`" for name in flag.spellings)
            yield f"| {names}{choices} | {flag.help.replace('|', chr(92) + '|')} |"
        yield ""


def reserved_rows() -> Iterator[str]:
    """Engine options that are refused, by reason."""
    for reason, patterns in RESERVED.items():
        flags = " ".join(f"`{as_flag(pattern)}`" for pattern in patterns.split())
        yield f"| {reason} | {flags} |"


def foreign_rows() -> Iterator[str]:
    """Per disposition one table of reasons and their flags."""
    by_reason: dict[tuple[Disposition, str], list[ForeignFlag]] = defaultdict(list)
    for flag in dict.fromkeys(foreign_flags().values()):
        by_reason[flag.disposition, flag.reason].append(flag)
    for disposition, title in TITLES.items():
        yield f"### {title}\n\n| why | flags |\n|---|---|"
        for (kind, reason), flags in by_reason.items():
            if kind is disposition:
                names = sorted(foreign_name(flag) for flag in flags)
                yield f"| {reason} | {' '.join(names)} |"
        yield ""


def foreign_name(flag: ForeignFlag) -> str:
    """Its spellings and its harmless values."""
    values = f" [{', '.join(flag.harmless_values)}]" if flag.harmless_values else ""
    return "/".join(f"`{name}`" for name in flag.spellings) + values


def render() -> str:
    """The whole document."""
    parts = [HEAD, *own_rows(), OPTIONS_HEAD, *reserved_rows(), "", FOREIGN_HEAD, *foreign_rows()]
    return "\n".join(parts).rstrip() + "\n"


def main() -> None:
    """Writes the file, or with ``--check`` fails when it is not up to date."""
    parser = argparse.ArgumentParser(description="Write docs/flags.md.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if not parser.parse_args().check:
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(render())
    elif not TARGET.is_file() or TARGET.read_text() != render():
        sys.exit(f"{TARGET} is out of date: run python tools/make_flag_docs.py")


if __name__ == "__main__":
    main()
