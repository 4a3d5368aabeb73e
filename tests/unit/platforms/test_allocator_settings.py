"""Expandable segments leave the environment before torch reads it."""

from __future__ import annotations

import pytest

from mindspeed_rl.platforms.allocator_settings import VARIABLES, WANTED, without_expandable_segments


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("expandable_segments:True", None),
        ("expandable_segments:true", None),
        (" expandable_segments : 1 ", None),
        ("max_split_size_mb:128,expandable_segments:True", "max_split_size_mb:128"),
        (
            "expandable_segments:True,garbage_collection_threshold:0.8,max_split_size_mb:64",
            "garbage_collection_threshold:0.8,max_split_size_mb:64",
        ),
    ],
)
def test_it_is_taken_out_and_told(value: str, left: str | None) -> None:
    """Of every variable that torch reads; WANTED is set for the NPU's alone."""
    for variable in VARIABLES:
        environ = {variable: value, "OTHER": value}
        (told,) = without_expandable_segments(environ)
        assert environ.get(variable) == left and environ["OTHER"] == value
        assert (WANTED in environ) == (variable == "PYTORCH_NPU_ALLOC_CONF")
        assert told.startswith(f"{variable}={value}: ")


@pytest.mark.parametrize(
    "value", ["", "expandable_segments:False", "max_split_size_mb:128", "expandable:True"]
)
def test_anything_else_stays(value: str) -> None:
    environ = dict.fromkeys(VARIABLES, value)
    assert without_expandable_segments(environ) == []
    assert environ == dict.fromkeys(VARIABLES, value)
