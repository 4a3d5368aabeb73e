"""Tensors of a run's state: out of the text of the record, into a file, and back to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mindspeed_rl.checkpoint.record_tensors import FILE, separated, with_tensors, write_tensors
from mindspeed_rl.core.errors import UsageError

STATE = {
    "groups": [[{"reward": 0.5, "n": 3}], []],
    "columns": {"ids": torch.arange(3, dtype=torch.int32), "p": torch.tensor([[-0.1], [-2.5e-8]])},
    "pair": (torch.tensor([True, False]), "text"),
}


def test_tensors_leave_the_record_and_come_back(tmp_path: Path) -> None:
    plain, tensors = separated(STATE)
    assert sorted(tensors) == ["columns.ids", "columns.p", "pair.0"]
    assert plain["groups"] == STATE["groups"] and plain["pair"] == [{"tensor": "pair.0"}, "text"]
    write_tensors(tmp_path, tensors)
    found = with_tensors(tmp_path, json.loads(json.dumps(plain)))
    for name, tensor in STATE["columns"].items():
        assert found["columns"][name].dtype == tensor.dtype
        assert torch.equal(found["columns"][name], tensor)
    assert torch.equal(found["pair"][0], STATE["pair"][0])


def test_a_state_without_tensors_has_no_file(tmp_path: Path) -> None:
    plain, tensors = separated({"step": 3, "name": None})
    write_tensors(tmp_path, tensors)
    assert plain == {"step": 3, "name": None} and not list(tmp_path.iterdir())
    assert with_tensors(tmp_path, plain) == plain


@pytest.mark.parametrize("content", [None, b"", b"no tensors"])
def test_a_file_that_is_not_that_of_the_record_is_named(
    content: bytes | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    with pytest.raises(UsageError, match=rf"--load .*{FILE}"):
        with_tensors(tmp_path, separated(STATE)[0])
