"""The Hugging Face writer replaces an earlier export and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_rl.checkpoint.hf_writer import HfWriter


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "float32"}')
    return folder


def export(target: Path, source: Path, value: float, step: int) -> None:
    with HfWriter(target, source, torch.float32, step=step) as writer:
        writer.add("weight", torch.full((2,), value))


def test_an_export_is_replaced_and_says_its_step(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "new" / "hf"
    for value, step in ((1.0, 5), (2.0, 9)):
        export(target, source, value, step)
        assert load_file(target / "model.safetensors")["weight"].tolist() == [value, value]
        assert json.loads((target / "export.json").read_text()) == {
            "format": "mindspeed_rl.hf_export",
            "version": 1,
            "step": step,
            "files": ["config.json", "model.safetensors"],
        }
    assert [p.name for p in target.parent.iterdir()] == ["hf"], "no leftovers"


@pytest.mark.parametrize("ours", [True, False])
def test_files_of_others_survive(tmp_path: Path, source: Path, ours: bool) -> None:
    target = tmp_path / "precious"
    if ours:
        export(target, source, 1.0, 1)
    target.mkdir(exist_ok=True)
    (target / "data.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"--export-hf .*precious (exists and was not|holds more)"):
        export(target, source, 2.0, 2)
    assert (target / "data.txt").read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["precious", "source"]
