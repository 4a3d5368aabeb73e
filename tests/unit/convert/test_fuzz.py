"""Whatever the small files of a checkpoint of Megatron hold: it is opened, or refused by name."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.conversions import config_of, hf_to_mg
from support.fuzzing import JSON, damaged, read_or_refused

from mindspeed_rl.checkpoint.resume import TRACKER
from mindspeed_rl.convert.formats import open_checkpoint
from mindspeed_rl.models.registry import spec_from_hf_config

fuzz = settings(
    deadline=None,
    max_examples=20,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was converted, and how it is opened as far as its first tensor."""

    folder: Path
    open: Callable[[], object]


def _converted(model: Path, folder: Path, *flags: str) -> Checkpoint:
    hf_to_mg(model, folder, flags)
    spec = spec_from_hf_config(config_of(model))

    def open_one() -> None:
        source = open_checkpoint(folder, "mg", spec, flag="--load")
        source.parts_of(next(iter(source.shapes)))

    return Checkpoint(folder, open_one)


@pytest.fixture(scope="module")
def distributed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return _converted(
        model, tmp_path_factory.mktemp("fuzz") / "dist", "--ckpt-format", "torch_dist"
    )


@pytest.fixture(scope="module")
def classic(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return _converted(model, tmp_path_factory.mktemp("fuzz") / "classic")


@fuzz
@given(data=st.data(), name=st.sampled_from([".metadata", "metadata.json", "common.pt"]))
def test_any_bytes_beside_the_tensors(
    data: st.DataObject, name: str, distributed: Checkpoint
) -> None:
    (file,) = distributed.folder.rglob(name)
    _with_content(file, damaged(file.read_bytes(), data), distributed)


@fuzz
@given(data=st.data())
def test_any_bytes_of_a_tracker(data: st.DataObject, classic: Checkpoint) -> None:
    file = classic.folder / TRACKER
    digits = st.sampled_from([b"9" * 5000, "\u0663".encode(), b"-1", b"../..", b"\0", b""])
    content = data.draw(digits) if data.draw(st.booleans()) else damaged(b"12", data)
    _with_content(file, content, classic)


@fuzz
@given(iteration=JSON, args=JSON)
def test_any_values_of_classic_files(iteration: Any, args: Any, classic: Checkpoint) -> None:
    file = min(classic.folder.rglob("*.pt"))
    state = torch.load(file, weights_only=False)
    content = io.BytesIO()
    torch.save(state | {"iteration": iteration, "args": args}, content)
    _with_content(file, content.getvalue(), classic)


@fuzz
@given(data=st.data())
def test_any_values_of_an_index(data: st.DataObject, distributed: Checkpoint) -> None:
    """Of the right classes, with parts that are not there or of other types."""
    (file,) = distributed.folder.rglob(".metadata")
    index = pickle.loads(file.read_bytes())
    tables = (index.state_dict_metadata, index.storage_data)
    parts = [part for table in tables for part in (*table, *table.values()) if vars_of(part)]
    for _ in range(data.draw(st.integers(1, 3))):
        part = parts[data.draw(st.integers(0, len(parts) - 1))]
        name = data.draw(st.sampled_from(vars_of(part)))
        object.__setattr__(part, name, data.draw(JSON))
    _with_content(file, pickle.dumps(index), distributed)


def vars_of(part: object) -> list[str]:
    """Names of what a part of an index says."""
    return sorted(vars(part)) if hasattr(part, "__dict__") else []


def _with_content(file: Path, content: bytes, checkpoint: Checkpoint) -> None:
    sound = file.read_bytes()
    file.write_bytes(content)
    try:
        read_or_refused(checkpoint.open, str(checkpoint.folder))
    finally:
        file.write_bytes(sound)
