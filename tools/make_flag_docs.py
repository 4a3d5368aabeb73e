"""Writes the pages about flags and algorithms: python tools/make_flag_docs.py [--check].

It writes all of ``docs/flags.md``, and in other pages the tables between ``<!-- table: NAME -->``
and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import needs_environment  # noqa: F401

from mindspeed_rl.algorithms.advantages import ESTIMATORS
from mindspeed_rl.algorithms.aggregation import AGGREGATIONS
from mindspeed_rl.algorithms.catalogue import Catalogue
from mindspeed_rl.algorithms.kl import KL_ESTIMATORS
from mindspeed_rl.algorithms.policy_losses import POLICY_LOSSES
from mindspeed_rl.algorithms.presets import PRESETS
from mindspeed_rl.command_line.arguments import ENTRIES, OwnFlag, own_flags
from mindspeed_rl.compat.foreign_flags import Disposition, ForeignFlag, foreign_flags
from mindspeed_rl.config.engine_options import as_flag
from mindspeed_rl.config.reward_spec import BUILT_IN_REWARDS
from mindspeed_rl.config.rewards import fields_of
from mindspeed_rl.core.flag import flag_names
from mindspeed_rl.engines.vllm.options import RESERVED
from mindspeed_rl.rewards.registry import built_in_reward, verdicts

DOCS = Path(__file__).resolve().parents[1] / "docs"
FLAGS_PAGE = "flags.md"
PAGES_WITH_TABLES = ("algorithms.md", "rewards.md")
_TABLE = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = """\
# Flags

This page lists all flags by topic; `--help TOPIC` of an entry prints the same in the terminal.
`python tools/make_flag_docs.py` generates it from `mindspeed_rl/config` and `mindspeed_rl/compat`.
"""
OPTIONS_HEAD = (
    "## Refused --vllm-* options (train_rl)\n\n| why, or what to use | options |\n|---|---|"
)
FOREIGN_HEAD = """\
## Flags of Megatron-LM, MindSpeed and MindSpeed-LLM

A script may pass every flag below. Those that are flags of the entry are in the tables above; an
entry's own flag wins over a row below. `_` and `-` are the same. A value in brackets asks for what
happens anyway and is accepted. The start of a run and its dry run count them all and say why the
run goes on without what some of them save; one error names all that are refused.
"""
TITLES = {
    Disposition.COMPARED: "Compared with the model",
    Disposition.ACCEPTED: "Accepted without effect, named once at start",
    Disposition.WITHOUT: "Gone without: time or memory is not saved, results are the same",
    Disposition.REFUSED: "Refused, with the fix",
}


def own_rows() -> Iterator[str]:
    """Yield one table per section; a section that both entries share is printed once."""
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
            yield f"| {names}{choices} | {_cell(flag.help)} |"
        yield ""


def reserved_rows() -> Iterator[str]:
    """Yield the engine options that are refused, by reason."""
    for reason, patterns in RESERVED.items():
        flags = " ".join(f"`{as_flag(pattern)}`" for pattern in patterns.split())
        yield f"| {reason} | {flags} |"


def foreign_rows() -> Iterator[str]:
    """Yield one table of reasons and their flags per disposition."""
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
    """Return the spellings of a flag and its harmless values."""
    values = f" [{', '.join(flag.harmless_values)}]" if flag.harmless_values else ""
    return "/".join(f"`{name}`" for name in flag.spellings) + values


def flags_page() -> str:
    """Return the page of all flags."""
    parts = [HEAD, *own_rows(), OPTIONS_HEAD, *reserved_rows(), "", FOREIGN_HEAD, *foreign_rows()]
    return "\n".join(parts).rstrip() + "\n"


Columns = Mapping[str, Callable[[Any], str]]
_NEEDS: Columns = {
    "group": lambda e: f"at least {e.min_group_size}",
    "needs": lambda e: "a critic" if e.needs_critic else "greedy responses" * e.needs_greedy,
}


def choice_table(catalogue: Catalogue[Any], what: str, more: Columns) -> Iterator[str]:
    """Yield a table of a flag's choices with the columns of ``more``, without empty columns."""
    rows = [
        {
            "name": f"`{name}`",
            what: choice.summary,
            **{column: text(choice) for column, text in more.items()},
            "reads": ", ".join(f"`{_spelled(setting)}`" for setting in choice.reads),
            "source": choice.source,
        }
        for name, choice in catalogue.items()
    ]
    return _table(rows)


def reward_table() -> Iterator[str]:
    """Yield the table of the built-in rewards."""
    rows = []
    for name, summary in BUILT_IN_REWARDS.items():
        reward = built_in_reward(name)
        rank = str(verdicts().index(name) + 1) if reward.verdict else ""
        read = [*reward.columns, *(flag_names(field)[0] for field in fields_of(name))]
        rows.append(
            {
                "name": f"`{name}`",
                "score": summary,
                "reads": ", ".join(f"`{name}`" for name in read),
                "verdict": rank,
            }
        )
    return _table(rows)


def preset_table() -> Iterator[str]:
    """Yield the table of ``--rl-preset``."""
    return _table(
        [
            {
                "name": f"`{name}`",
                "what": preset.summary,
                "sets": ", ".join(f"`{' '.join(flag)}`" for flag in preset.flags),
                "source": preset.source,
            }
            for name, preset in PRESETS.items()
        ]
    )


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "advantage estimators": lambda: choice_table(ESTIMATORS, "advantage", _NEEDS),
    "policy losses": lambda: choice_table(
        POLICY_LOSSES, "loss of a token", {"aggregation": lambda loss: f"`{loss.aggregation}`"}
    ),
    "aggregations": lambda: choice_table(AGGREGATIONS, "weight of a token", {}),
    "KL estimators": lambda: choice_table(KL_ESTIMATORS, "estimate", {}),
    "presets": preset_table,
    "rewards": reward_table,
}


def _table(rows: list[dict[str, str]]) -> Iterator[str]:
    columns = [column for column in rows[0] if any(row[column] for row in rows)]
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(_cell(row[column]) for column in columns)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _spelled(field: str) -> str:
    """Return the flag of a configuration field of train_rl."""
    flags = (flag for _, own in own_flags(ENTRIES["mindspeed_rl.train_rl"]) for flag in own)
    return next(flag.spellings[0] for flag in flags if flag.field == field)


def with_tables(text: str) -> str:
    """Return a page with its tables replaced by new ones."""

    def written(match: re.Match[str]) -> str:
        return match[1] + "\n".join(TABLES[match[2]]()) + "\n" + match[3]

    return _TABLE.sub(written, text)


def main() -> None:
    """Write the pages, or with ``--check`` fail if one is not up to date."""
    parser = argparse.ArgumentParser(description="Write the pages of flags and algorithms.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    pages = {DOCS / FLAGS_PAGE: flags_page()}
    pages |= {DOCS / name: with_tables((DOCS / name).read_text()) for name in PAGES_WITH_TABLES}
    for path, text in pages.items():
        if not check:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            sys.exit(f"{path} is out of date: run python tools/make_flag_docs.py")


if __name__ == "__main__":
    main()
