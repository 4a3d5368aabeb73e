"""Every flag is read by something, or the run says that it is not (R51, R55)."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

import mindspeed_rl
from mindspeed_rl.arguments import ENTRIES, own_flags, parse
from mindspeed_rl.config import NpuConfig, RLRunConfig

PACKAGE = Path(mindspeed_rl.__file__).parent

SAYS_WHAT_HOLDS = {
    "perform_rl_step": "Megatron's switch for what this entry does",
    "position_embedding_type": "one choice, that of every family",
    "normalization": "one choice, that of every family",
}
"""Flags that no code reads, as no value of theirs could change anything."""


def read_names() -> set[str]:
    """Attributes that the package reads anywhere but where its flags are declared."""
    return {
        node.attr
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def test_every_flag_is_read_or_said_to_do_nothing() -> None:
    by_name = {field.name for field in dataclasses.fields(NpuConfig)}  # npu_setup passes them all
    known = read_names() | by_name | set(SAYS_WHAT_HOLDS)
    flags = [flag for entry in ENTRIES.values() for _, own in own_flags(entry) for flag in own]
    unread = {flag.field for flag in flags if flag.field not in known and not flag.info.inert}
    assert not unread, "remove them, or declare them inert"


def test_an_inert_flag_is_read_by_nothing() -> None:
    inert = {
        flag.field
        for entry in ENTRIES.values()
        for _, own in own_flags(entry)
        for flag in own
        if flag.info.inert
    }
    assert inert == {"rl_algorithm", "swiglu", "group_query_attention", "disable_bias_linear"}
    assert not inert & read_names()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("--swiglu --rl-algorithm grpo --rl-algorithm=grpo", ("--swiglu", "--rl-algorithm")),
        ("--disable_bias_linear --use-flash-attn", ("--use-flash-attn", "--disable-bias-linear")),
        (
            "--sequence-parallel",
            ("--sequence-parallel (needs --tensor-model-parallel-size above 1)",),
        ),
        ("--sequence-parallel --tensor-model-parallel-size 2", ()),
        ("--perform-rl-step --position-embedding-type rope", ()),
    ],
)
def test_flags_that_do_nothing_are_listed(argv: str, told: tuple[str, ...]) -> None:
    assert parse(RLRunConfig, argv.split(), "test").ignored == told
