"""Command line to configuration: dataclasses make the flags, foreign flags get a disposition.

Layer 0. A script may pass every flag of a Megatron-LM, MindSpeed or MindSpeed-LLM pretraining
script: what has a meaning is honoured, what has none is listed once at start, what would make
results wrong is refused with the reason (:mod:`mindspeed_rl.compat`).
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mindspeed_rl.compat import ForeignUse, UsedFlag, classify
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.flag import FlagInfo, flag_names

Run = TypeVar("Run", RLRunConfig, PretrainRunConfig)


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedArguments(typing.Generic[Run]):
    """A configuration and what to tell the user about the flags that do nothing here."""

    config: Run
    ignored: tuple[str, ...]


def parse(run_type: type[Run], argv: Sequence[str], prog: str) -> ParsedArguments[Run]:
    """Parse a command line into ``run_type``.

    Raises:
        ValueError: unknown, refused or malformed flags, all of them in one message.
        SystemExit: ``--help`` was asked for.
    """
    sections = _sections(run_type)
    parser = build_parser(run_type, prog)
    own = {name for name in parser._option_string_actions if name.startswith("--")}
    rest, vllm_options = (
        _take_vllm_options(argv)
        if "vllm_options" in _names(run_type)
        else (
            list(argv),
            {},
        )
    )
    use = classify(rest, own)
    if problems := _problems(use):
        raise ValueError("; ".join(problems))
    namespace = vars(parser.parse_args(list(use.own_argv)))
    built: dict[str, Any] = {
        name: section(**{f.name: _as_field(namespace[f.name]) for f in dataclasses.fields(section)})
        for name, section in sections.items()
    }
    if vllm_options:
        built["vllm_options"] = vllm_options
    _check_numbers(built)
    ignored = tuple(_as_typed(used) for used in use.no_meaning)
    return ParsedArguments(run_type(**built), ignored)


def _as_typed(used: UsedFlag) -> str:
    return " ".join([used.flag, *used.values])


def _problems(use: ForeignUse) -> list[str]:
    """One sentence per flag that cannot be accepted."""
    unknown = [
        f"unknown flag {word.token}; nearest: {', '.join(word.nearest) or 'none'}"
        for word in use.unknown
    ]
    return unknown + [f"{_as_typed(used)} is refused: {used.reason}" for used in use.refused]


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting, so that one rank can speak for all."""

    def error(self, message: str) -> typing.NoReturn:
        raise ValueError(message)


def build_parser(run_type: type[Any], prog: str) -> argparse.ArgumentParser:
    """The parser of an entry: one argument group per section, help from the field metadata."""
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description=(run_type.__doc__ or "").strip(),
        epilog="Flags of a Megatron or MindSpeed pretraining script that are not listed are "
        "accepted when they have no meaning here and refused, with the reason, when they would "
        "change results.",
    )
    seen: set[str] = set()
    for section in _sections(run_type).values():
        title, _, text = (section.__doc__ or section.__name__).partition("\n")
        group = parser.add_argument_group(title.strip().rstrip("."), " ".join(text.split()))
        hints = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            if field.name not in seen:
                seen.add(field.name)
                _add_flag(group, field, hints[field.name])
    return parser


def _names(run_type: type[Any]) -> set[str]:
    return {f.name for f in dataclasses.fields(run_type)}


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


def _add_flag(group: Any, field: dataclasses.Field[Any], hint: Any) -> None:
    info: FlagInfo = field.metadata["flag"]
    names, kind = flag_names(field), _scalar(hint)
    common = {"dest": field.name, "default": field.default, "help": info.help}
    if kind is bool:
        group.add_argument(
            *names, action="store_false" if field.default is True else "store_true", **common
        )
        return
    group.add_argument(
        *names,
        type=kind,
        choices=info.choices or None,
        nargs=info.nargs,
        metavar=None if info.choices else kind.__name__.upper(),
        **common,
    )


def _as_field(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_numbers(built: Mapping[str, Any]) -> None:
    for section in built.values():
        if not dataclasses.is_dataclass(section):
            continue
        for field in dataclasses.fields(section):
            info: FlagInfo = field.metadata["flag"]
            value = getattr(section, field.name)
            if info.minimum is not None and value is not None and value < info.minimum:
                raise ValueError(
                    f"{flag_names(field)[0]} {value}: must be at least {info.minimum:g} "
                    f"({info.help})"
                )


def _take_vllm_options(argv: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """Split ``--vllm-max-num-seqs 512`` off as engine options; values are read as JSON or text."""
    import json

    rest: list[str] = []
    options: dict[str, object] = {}
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("--vllm-"):
            rest.append(token)
            continue
        name, equals, value = token.removeprefix("--vllm-").partition("=")
        if not equals:
            has_value = bool(tokens) and not tokens[0].startswith("--")
            value = tokens.pop(0) if has_value else "true"
        try:
            options[name.replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            options[name.replace("-", "_")] = value
    return rest, options


__all__ = ["ParsedArguments", "build_parser", "parse"]
