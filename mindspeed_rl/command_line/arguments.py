"""Command line to configuration: dataclasses make the flags, foreign flags get a disposition.

A script may pass every flag of a Megatron-LM, MindSpeed or MindSpeed-LLM pretraining script: a flag
with a meaning here is honoured, one without is listed once at start, of one that saves time or
memory in a way that cannot be had here a sentence says so, and one that would make results wrong is
refused with the reason (:mod:`mindspeed_rl.compat`).
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

from mindspeed_rl.algorithms.presets import AppliedPreset, apply_preset, take_switched_off
from mindspeed_rl.command_line.benchmark_run import as_benchmark
from mindspeed_rl.command_line.help_topics import (
    ALL,
    asked_topic,
    index,
    print_for_pager,
    unknown_topic,
)
from mindspeed_rl.command_line.replay_run import as_replay
from mindspeed_rl.compat.classify import ForeignUse, UnknownToken, UsedFlag, classify
from mindspeed_rl.compat.foreign_flags import ForeignFlag, foreign_flags
from mindspeed_rl.compat.synonyms import answer_to_override, synonyms
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig, ScoreRunConfig
from mindspeed_rl.config.engine_options import take_engine_options
from mindspeed_rl.core.errors import Mistakes, UsageError, refuse
from mindspeed_rl.core.flag import FlagInfo, flag_names
from mindspeed_rl.flag_checks.needs import needs_of, unread_beside

P = ParamSpec("P")
Made = TypeVar("Made")
Run = TypeVar("Run", RLRunConfig, PretrainRunConfig, ScoreRunConfig)

ENTRIES: Mapping[str, type[Any]] = {
    "mindspeed_rl.train_rl": RLRunConfig,
    "mindspeed_rl.pretrain": PretrainRunConfig,
    "mindspeed_rl.score": ScoreRunConfig,
}
"""Configuration class of every entry."""

_METAVARS = {int: "N", float: "X", str: "TEXT"}
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_MAX_HELP_COLUMNS = 100
_MAX_METAVAR = 60  # longer lists of choices are sentences of the help
_HELP_INDENT = 32
_EPILOG = """\
from a pretraining script to this entry:
  Keep the bash arrays of the script, name the model and the data, and append
  the flags of this entry:

    torchrun --nproc-per-node 8 -m {prog} \\
        "${{GPT_ARGS[@]}}" "${{OPTIMIZER_ARGS[@]}}" "${{PARALLEL_ARGS[@]}}" \\
        --hf-checkpoint models/qwen2.5-7b \\
        {example}

  Flags of Megatron-LM, MindSpeed and MindSpeed-LLM that are not listed above
  are accepted where they change nothing here (and named once at start; of
  those that save time or memory it is said why the run goes on without),
  compared with the model where they are architecture numbers, and refused,
  with the reason, where they would make results wrong. docs/flags.md lists
  them all. A flag that is given twice takes its last value.
"""
_EXAMPLES: Mapping[type[Any], tuple[str, ...]] = {
    RLRunConfig: (
        "--perform-rl-step --prompt-data train.jsonl --reward-function math",
        "--grpo-prompts-per-step 32 --grpo-group-size 8",
        "--global-batch-size 256 --train-iters 100 --lr 1e-6",
        "--rollout-tp 2 --rollout-max-response-length 1024",
        "--rollout-kv-cache-gb 16",
    ),
    PretrainRunConfig: (
        "--stage sft --sft-data train.jsonl",
        "--global-batch-size 64 --train-iters 200",
        "--export-hf models/warm-start",
    ),
    ScoreRunConfig: (
        "--tokens in.npz --output out.npz --backend megatron",
        "--tensor-model-parallel-size 2 --micro-batch-size 8",
    ),
}


def _once(make: Callable[P, Made]) -> Callable[P, Made]:
    """As ``functools.cache``, to whose types a ``type[Any]`` is not hashable."""
    return cache(make)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedArguments(typing.Generic[Run]):
    """A configuration and the flags of the command line that are not part of it.

    Attributes:
        ignored: Flags as typed that do nothing here and are listed at start.
        checked_arch: Architecture flags to compare with the HF config, by
            :func:`mindspeed_rl.compat.architecture.check_foreign_architecture`.
        without: Flags that save time or memory, which the run goes on without, with the reason.
        honoured: Names of the given flags that have a meaning here.
        refused: A sentence for every flag that ends the run.
        typed: The command line itself.
        preset: What ``--rl-preset`` has set; ``None`` without it.
        compared: Names of the given flags of this project that are only compared with the model.
    """

    config: Run
    ignored: tuple[str, ...]
    checked_arch: tuple[UsedFlag, ...] = ()
    without: tuple[UsedFlag, ...] = ()
    honoured: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()
    preset: AppliedPreset | None = None
    compared: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class OwnFlag:
    """One flag of an entry.

    Attributes:
        field: Name of the configuration field.
        spellings: All spellings, the canonical one first.
        kind: ``bool`` for switches, else the type of the value or values.
        default: Value when the flag is not given.
        info: Help, choices and limits of the flag, and the condition under which it is read.
    """

    field: str
    spellings: tuple[str, ...]
    kind: type
    default: object
    info: FlagInfo

    @property
    def help(self) -> str:
        """The full help text: description, limits, condition and default, in sentences."""
        parts = [self.info.help]
        if limits := self.info.limits:
            parts.append(f"{limits[0].upper()}{limits[1:]}.")
        if (needs := self.info.needs) is not None:
            parts.append(f"Read with {needs}." if needs.values else f"Needs {needs}.")
        if isinstance(self.default, tuple):
            if self.default:
                parts.append(f"Default: {' '.join(self.default)}.")
        elif self._shows_default:
            parts.append(f"Default: {self.default}.")
        return " ".join(parts)

    @property
    def _shows_default(self) -> bool:
        """Whether help states the default: not for switches, unset values and required numbers."""
        if self.kind is bool or self.default in (None, ""):
            return False
        return not isinstance(self.default, int | float) or self.info.allows(self.default)

    def bind(self, typed: str, values: Sequence[str]) -> list[str]:
        """Make tokens for argparse; a single value is attached, so that it may begin with a dash.

        Raises:
            UsageError: There are too few or too many values.
        """
        if self.kind is bool:
            if values:
                raise UsageError(
                    f"{typed} is a switch, got the value {values[0]!r}; remove the value"
                )
            return [typed]
        wanted = "one value" if self.info.nargs is None else "one or more values"
        if not values:
            raise UsageError(f"{typed} takes {wanted}, got none; add it or remove the flag")
        if self.info.nargs is not None:
            return [typed, *values]
        if len(values) > 1:
            raise UsageError(
                f"{typed} takes one value, got {len(values)}: {' '.join(values)}; remove the "
                "others, or put quotes around a value with spaces"
            )
        return [f"{typed}={values[0]}"]


@_once
def own_flags(run_type: type[Any]) -> tuple[tuple[type[Any], list[OwnFlag]], ...]:
    """The flags of an entry by section; a field that two sections share is listed once."""
    return tuple(_own_flags(run_type))


def _own_flags(run_type: type[Any]) -> Iterator[tuple[type[Any], list[OwnFlag]]]:
    seen: set[str] = set()
    for section in _sections(run_type).values():
        hints = typing.get_type_hints(section)
        fields = [field for field in dataclasses.fields(section) if field.name not in seen]
        seen.update(field.name for field in fields)
        yield (
            section,
            [
                OwnFlag(
                    field.name,
                    flag_names(field),
                    _scalar(hints[field.name]),
                    field.default,
                    dataclasses.replace(field.metadata["flag"], needs=needs_of(field)),
                )
                for field in fields
            ],
        )


def parse(
    run_type: type[Run], argv: Sequence[str], prog: str, *, keep_refused: bool = False
) -> ParsedArguments[Run]:
    """Parse a command line into ``run_type``.

    Args:
        run_type: Configuration class of an entry.
        argv: Tokens after the program name.
        prog: Name of the entry's module, for ``--help``.
        keep_refused: Whether unknown and refused flags are returned instead of raised, so that the
            caller reports them together with what else is wrong.

    Raises:
        UsageError: Flags are unknown, refused or malformed; one message has as many as possible.
        SystemExit: ``--help`` was asked for.
    """
    if (topic := asked_topic(argv)) is not None:
        print_for_pager(help_text(run_type, prog, topic))
        raise SystemExit(0)
    takes_options = "engine_options" in run_type.__dataclass_fields__
    rest: list[str] = list(argv)
    malformed: list[str] = []
    engine_options: dict[str, object] = {}
    if takes_options:
        rest, engine_options, malformed = take_engine_options(argv)
    parser = build_parser(run_type, prog)
    off: frozenset[str] = frozenset()
    if run_type is RLRunConfig:
        rest, off = take_switched_off(rest)
    use: ForeignUse = _classified(run_type, rest, parser, foreign_flags())
    refused: list[str] = _problems(use, run_type)
    if not keep_refused:
        refuse(refused)
    flags = _by_spelling(run_type)
    typed = dict.fromkeys(name for name, _ in use.own)
    compared = tuple(name for name in typed if flags[name].info.compared)
    honoured = tuple(name for name in typed if name not in compared)
    mistakes = Mistakes([*malformed, *use.malformed])
    with mistakes:
        built, preset = _built_with_preset(run_type, use, parser, off)
    mistakes.report(refused)
    if engine_options:
        built["engine_options"] = engine_options
    ignored = [used.typed for used in use.accepted]
    ignored += built["parallel"].idle_flags
    config: Any = run_type(**built)
    with mistakes:
        if isinstance(config, RLRunConfig):
            config = as_replay(as_benchmark(config))
    mistakes.report(refused)
    refused += unread_beside(config, {flags[name].spellings[0] for name in honoured})
    return ParsedArguments(
        config,
        tuple(ignored),
        tuple(use.compared),
        tuple(use.without),
        honoured,
        tuple(refused),
        tuple(argv),
        preset,
        compared,
    )


def parse_sections(
    run_type: type[Any],
    argv: Sequence[str],
    parser: argparse.ArgumentParser,
    foreign: Mapping[str, ForeignFlag],
) -> tuple[dict[str, Any], ForeignUse]:
    """Parse a command line into the sections of ``run_type``, by the name of their field.

    Args:
        run_type: A dataclass whose fields are dataclasses of flags.
        argv: Tokens after the program name.
        parser: Result of :func:`build_parser`.
        foreign: Answers to flags that ``run_type`` does not have.

    Returns:
        The sections, and what was found of foreign flags.

    Raises:
        UsageError: Flags are unknown, refused or malformed; one message has as many as possible.
        SystemExit: ``--help`` was asked for.
    """
    use = _classified(run_type, argv, parser, foreign)
    refuse([*_problems(use, run_type), *use.malformed])
    return _built(run_type, use, parser), use


def _classified(
    run_type: type[Any],
    argv: Sequence[str],
    parser: argparse.ArgumentParser,
    foreign: Mapping[str, ForeignFlag],
) -> ForeignUse:
    if not {"-h", "--help"}.isdisjoint(argv):
        parser.parse_args(["--help"])
    return classify(argv, _by_spelling(run_type), foreign)


def _built(run_type: type[Any], use: ForeignUse, parser: argparse.ArgumentParser) -> dict[str, Any]:
    by_spelling = _by_spelling(run_type)
    mistakes, bound = Mistakes(), list[str]()
    for name, values in use.own:
        with mistakes:
            words = by_spelling[name].bind(name, values)
            parser.parse_args(words)  # alone, as argparse ends at the first mistake
            bound += words
    mistakes.report()
    namespace = vars(parser.parse_args(bound))
    return {
        name: section(**{f.name: _as_field(namespace[f.name]) for f in dataclasses.fields(section)})
        for name, section in _sections(run_type).items()
    }


def _built_with_preset(
    run_type: type[Any], use: ForeignUse, parser: argparse.ArgumentParser, off: Collection[str]
) -> tuple[dict[str, Any], AppliedPreset | None]:
    """Build the sections, with the flags of ``--rl-preset`` in front of those that were typed."""
    built = _built(run_type, use, parser)
    name = built["rl"].rl_preset if run_type is RLRunConfig else ""
    if not name:
        return built, None
    flags = _by_spelling(run_type)
    typed = {flags[spelling].spellings[0] for spelling, _ in use.own}
    preset = apply_preset(name, typed, off, built["rollout"].rollout_max_response_length)
    use.own[:0] = [(flag, values) for flag, *values in preset.flags]
    return _built(run_type, use, parser), preset


def build_parser(
    run_type: type[Any], prog: str, usage: str = "", epilog: str = ""
) -> argparse.ArgumentParser:
    """Make a parser: one argument group per section, help from the field metadata.

    ``usage`` and ``epilog`` are those of the entries where they are not given.
    """
    return _parser(run_type, prog, usage, epilog, _columns())


@_once
def _parser(
    run_type: type[Any], prog: str, usage: str, epilog: str, columns: int
) -> argparse.ArgumentParser:
    if not epilog:
        example = " \\\n        ".join(_EXAMPLES[run_type])
        epilog = _EPILOG.format(prog=prog, example=example)
    parser = _Parser(
        prog=prog,
        usage=usage or _usage(prog),
        allow_abbrev=False,
        formatter_class=_formatter(columns),
        description=_paragraphs(run_type, columns),
        epilog=epilog,
    )
    for section, flags in own_flags(run_type):
        _add_section(parser, section, flags, columns)
    return parser


def _title(section: type[Any]) -> str:
    return (inspect.getdoc(section) or "").partition("\n")[0].rstrip(".")


def _columns() -> int:
    """Return the width of help; the last column stays free, as some terminals wrap after it."""
    return min(shutil.get_terminal_size().columns - 1, _MAX_HELP_COLUMNS)


def _usage(prog: str) -> str:
    return f"torchrun ... -m {prog} --hf-checkpoint DIR [flags]"


def _formatter(columns: int) -> Any:
    return partial(argparse.RawTextHelpFormatter, max_help_position=_HELP_INDENT, width=columns)


def _add_section(
    parser: argparse.ArgumentParser, section: type[Any], flags: Sequence[OwnFlag], columns: int
) -> None:
    """Add a group with the flags of a section, under its description."""
    title, _, text = _paragraphs(section, columns - 2).partition("\n")
    group = parser.add_argument_group(title.rstrip("."), text.strip("\n"))
    for flag in flags:
        _add_flag(group, flag, columns - _HELP_INDENT)


def help_text(run_type: type[Any], prog: str, topic: str) -> str:
    """Return the help of an entry about a topic, a flag, everything (``all``), or its index.

    Raises:
        UsageError: There is no such topic or flag.
    """
    if topic == ALL:
        return build_parser(run_type, prog).format_help()
    found = {
        name.replace("_", "-"): part
        for name, part in zip(_sections(run_type), own_flags(run_type), strict=True)
    }
    columns = _columns()
    if not topic:
        titles = {n: _title(section) for n, (section, _) in found.items()}
        about = _paragraphs(run_type, columns)
        return index(f"usage: {_usage(prog)}", about, titles, prog, columns)
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, add_help=False, formatter_class=_formatter(columns)
    )
    if topic in found:
        _add_section(parser, *found[topic], columns)
        return parser.format_help().strip("\n")
    for name, (_, flags) in found.items():
        for flag in flags:
            if f"--{topic.lstrip('-').replace('_', '-')}" in flag.spellings:
                group = parser.add_argument_group(f"a flag of --help {name}")
                _add_flag(group, flag, columns - _HELP_INDENT)
                return parser.format_help().strip("\n")
    spellings = [s for _, flags in found.values() for flag in flags for s in flag.spellings]
    raise UsageError(unknown_topic(topic, found, spellings))


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of exiting, so that one rank can report for all."""

    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(message.removeprefix("argument "))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if near := get_close_matches(str(value), list(map(str, action.choices or ())), n=1):
                error.message += f"; did you mean {near[0]!r}?"
            raise


def _add_flag(group: Any, flag: OwnFlag, columns: int) -> None:
    choices, text = flag.info.choices, flag.help
    metavar = None if choices else _METAVARS.get(flag.kind)
    if len(",".join(choices)) > _MAX_METAVAR:
        metavar = "NAME"
        text += f" NAME is one of {', '.join(choices)}."
    text = _filled(text, columns).replace("%", "%%")
    common = {"dest": flag.field, "default": flag.default, "help": text}
    if flag.kind is bool:
        action = "store_false" if flag.default is True else "store_true"
        group.add_argument(*flag.spellings, action=action, **common)
        return
    group.add_argument(
        *flag.spellings,
        type=str if flag.kind is str else partial(_number, kind=flag.kind, info=flag.info),
        choices=choices or None,
        nargs=flag.info.nargs,
        metavar=metavar,
        **common,
    )


def _number(text: str, kind: type[int] | type[float], info: FlagInfo) -> float:
    try:
        value = kind(text)
        allowed = math.isfinite(value) and info.allows(value)
    except (ValueError, OverflowError):
        allowed = False
    if not allowed:
        what, like = ("whole", "1000") if kind is int else ("finite", "0.5 or 1e-6")
        limits = f" of {info.limits}" if info.limits else ""
        raise argparse.ArgumentTypeError(
            f"must be a {what} number{limits}, written like {like}, got {text!r}"
        )
    return value


def _problems(use: ForeignUse, run_type: type[Any]) -> list[str]:
    """One sentence per flag that cannot be accepted."""
    elsewhere = {
        spelling: prog
        for prog, other in ENTRIES.items()
        if other is not run_type
        for spelling in _by_spelling(other)
    }
    own = _by_spelling(run_type)
    other_stacks = {
        flag: answer
        for flag, answer in synonyms().items()
        if all(name in own for name in _FLAG.findall(answer))
    }
    unknown = [_unknown(word, elsewhere, other_stacks, own) for word in use.unknown]
    return unknown + [f"{used.typed} is refused: {used.reason}" for used in use.refused]


def _unknown(
    word: UnknownToken,
    elsewhere: Mapping[str, str],
    other_stacks: Mapping[str, str],
    own: Collection[str],
) -> str:
    if not word.token.startswith("-"):
        path, equals, _ = word.token.partition("=")
        if equals and "." in path:
            hint = answer_to_override(path, other_stacks, own)
            return (
                f"{word.token} is an override as in verl; flags are written --flag value here{hint}"
            )
        return f"unexpected value {word.token!r}: the flag before it takes fewer values; remove it"
    name = word.token.partition("=")[0].replace("_", "-")
    if name in elsewhere:
        return f"{name} is a flag of {elsewhere[name]}, not of this entry; remove it"
    if name in other_stacks:
        return f"unknown flag {name} of other stacks; it {other_stacks[name]}"
    hint = f"nearest: {', '.join(word.nearest)}" if word.nearest else "none is near; see --help"
    return f"unknown flag {word.token}; {hint}"


def as_typed(error: UsageError, run_type: type[Any], argv: Sequence[str]) -> UsageError:
    """Return mistakes in which a flag with several spellings has the one that was typed.

    Args:
        error: Mistakes, which name flags by their canonical spellings.
        run_type: Configuration class of the entry.
        argv: Tokens after the program name.
    """
    flags = _by_spelling(run_type)
    names = [token.partition("=")[0].replace("_", "-") for token in argv]
    # The last spelling counts, as its value does.
    typed = {flags[name].spellings[0]: name for name in names if name in flags}
    return UsageError(
        *(
            re.sub(r"--[a-z][\w-]*", lambda found: typed.get(found[0], found[0]), line)
            for line in error.mistakes
        )
    )


@_once
def _by_spelling(run_type: type[Any]) -> dict[str, OwnFlag]:
    return {
        spelling: flag
        for _, flags in own_flags(run_type)
        for flag in flags
        for spelling in flag.spellings
    }


@_once
def _sections(run_type: type[Any]) -> dict[str, type[Any]]:
    hints = typing.get_type_hints(run_type)
    return {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}  # type: ignore[misc]


def _scalar(hint: Any) -> type:
    """The element type of ``int``, ``int | None`` or ``tuple[str, ...]``."""
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))  # type: ignore[no-any-return]
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0]  # type: ignore[no-any-return]
    return hint  # type: ignore[no-any-return]


def _as_field(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _paragraphs(documented: type[Any], columns: int) -> str:
    """The docstring of a class as terminal text, wrapped."""
    text = (inspect.getdoc(documented) or "").replace("``", "")
    return "\n\n".join(_filled(block, columns) for block in text.split("\n\n"))


def _filled(text: str, columns: int) -> str:
    """Wrap a text without breaking flags at their hyphens."""
    return textwrap.fill(text, max(columns, 24), break_on_hyphens=False)
