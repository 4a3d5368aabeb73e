"""Engine flags by version: every key is one that the version reads, or there is a way out."""

from __future__ import annotations

import re

import pytest
from support.ascend_api import snapshot

from mindspeed_rl.config import EngineTuningConfig
from mindspeed_rl.rollout.ascend_versions import (
    ALWAYS,
    TABLE,
    VERSIONS,
    Gone,
    Key,
    ascend_arguments,
    ascend_version,
    by_version,
    markdown_table,
    used_paths,
)

FULL = {v: "0.26.1.dev3" if v == "main" else v if v.count(".") == 2 else f"{v}.0" for v in VERSIONS}
# Flags that need others.
NEEDS = {
    "rollout_graph_sizes torchair": {"rollout_graph_mode": "torchair"},
    "rollout_multistream_mla": {"rollout_graph_mode": "torchair"},
    "rollout_multistream_moe": {"rollout_graph_mode": "torchair"},
    "rollout_kv_nz": {"rollout_graph_mode": "torchair"},
    "rollout_view_optimize": {"rollout_graph_mode": "torchair"},
    "rollout_chunked_prefill ascend": {"rollout_scheduler": "ascend"},
}
VALUES = {
    "rollout_graph_sizes": ("8", "64"),
    "rollout_view_optimize": "off",
    "rollout_chunked_prefill": "off",
    "rollout_expert_map": "map.json",
}


def tuning(row: str, column: str) -> EngineTuningConfig:
    """The flags that ask for a row, and those that it needs."""
    name, _, choice = row.partition(" ")
    default = EngineTuningConfig.__dataclass_fields__[name].default
    value = VALUES.get(name, True if default is False else choice)
    needs = NEEDS.get(row, {})
    if row == "rollout_multistream_moe" and column != "0.9.1":
        needs = {}
    return EngineTuningConfig(**{**needs, name: value})


@pytest.mark.parametrize("column", VERSIONS)
def test_every_key_is_read_by_the_version(column: str) -> None:
    """Against the keys and arguments in its sources: it says nothing of keys it does not know."""
    read = snapshot()["settings"][column]
    for path in sorted(used_paths(column)):
        top, _, rest = path.partition(".")
        if top == "additional_config":
            assert rest in read["additional_config"], path
        elif top == "env":
            assert rest in read["environment"], path
        elif top == "compilation_config":
            assert rest in read["CompilationConfig"], path
        else:
            assert path in read["EngineArgs"], path


@pytest.mark.parametrize("row", [row for row in TABLE if row not in ALWAYS])
@pytest.mark.parametrize("column", VERSIONS)
def test_a_flag_is_set_or_refused_with_a_way_out(row: str, column: str) -> None:
    target = TABLE[row][column]
    flags = tuning(row, column)
    sizes = (8, 64) if flags.rollout_graph_sizes else ()
    if isinstance(target, Gone):
        with pytest.raises(ValueError) as refused:
            ascend_arguments(flags, FULL[column], sizes)
        assert FULL[column] in str(refused.value)
        assert re.search(r"use|remove|--rollout", str(refused.value).partition(": not with")[2])
        return
    found = ascend_arguments(flags, FULL[column], sizes)
    if target.path.startswith("env."):
        assert found.environment[target.path[4:]] == str(target.value)
        return
    at = found.arguments
    for name in target.path.split("."):
        at = at[name]
    name = row.partition(" ")[0]
    asked = {"rollout_graph_sizes": [8, 64], "rollout_expert_map": "map.json"}.get(
        name, {"off": False}.get(getattr(flags, name), True)
    )
    assert at == (asked if target.value is None else target.value)


def test_nothing_is_set_that_nobody_asked_for() -> None:
    """Defaults set what updates need, and the ranks' reduction where it is ours."""
    for column in VERSIONS:
        found = ascend_arguments(EngineTuningConfig(), FULL[column])
        expected = {t.path for row in ALWAYS if isinstance(t := TABLE[row][column], Key)} | {
            "enforce_eager"
        }
        if isinstance(packed := TABLE["rollout_dp_sync packed"][column], Key):
            expected.add(packed.path)
        assert set(_paths(found.arguments)) | {f"env.{n}" for n in found.environment} == (
            expected | ({"env.VLLM_ASCEND_ENABLE_NZ"} if column not in ("0.9.1",) else set())
        )


def _paths(value: object, prefix: str = "") -> list[str]:
    if not isinstance(value, dict):
        return [prefix]
    return [p for k, v in value.items() for p in _paths(v, f"{prefix}.{k}" if prefix else k)]


def test_keys_of_torchair_need_torchair() -> None:
    with pytest.raises(ValueError, match="needs torchair for enable_multistream_mla; use"):
        ascend_arguments(EngineTuningConfig(rollout_multistream_mla=True), "0.11.0")


@pytest.mark.parametrize(
    ("full", "column"),
    [("0.9.1", "0.9.1"), ("0.11.0rc1", "0.11"), ("0.23.0.post1", "0.23"), ("0.26.1.dev3", "main")],
)
def test_versions_by_prefix(full: str, column: str) -> None:
    assert ascend_version(full) == column


@pytest.mark.parametrize("full", ["0.9.10", "0.10.0", "0.230.1", "0.24.0"])
def test_versions_between_are_refused(full: str) -> None:
    with pytest.raises(ValueError, match=r"is not one of 0\.9\.1, .*install the version of"):
        ascend_version(full)


def test_help_and_docs_have_the_table() -> None:
    text = " ".join(by_version("rollout_kv_nz"))
    assert "0.9.1 to 0.11: `additional_config.torchair_graph_config.enable_kv_nz`" in text
    assert "0.13 to main: not there" in text
    assert by_version("rollout_dp") == []
    assert len(markdown_table()) > len(TABLE) + 2
