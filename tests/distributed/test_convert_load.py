"""``--load`` takes converted checkpoints and those of MindSpeed-LLM, in other layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.classic_writer import Classic, write_classic
from support.conversions import (
    assert_equal,
    config_of,
    convert,
    hf_tensors,
    hf_to_mg,
    mg_to_hf,
    write_model,
)
from support.spawn import run_ranks

from mindspeed_rl.config.training import CheckpointConfig
from mindspeed_rl.launch.bootstrap import World

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FLAGS = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16",
         "--expert-tensor-parallel-size", "1", "--expert-model-parallel-size", "2",
         "--make-vocab-size-divisible-by", "8")  # fmt: skip


def load_all(
    world: World, model: str, folders: Sequence[str], save: str
) -> list[tuple[dict[str, torch.Tensor], int, tuple[str, ...]]]:
    """Rank function: whole weights, step and notes after each load into zeros; then a save."""
    from support.training_worlds import in_hf_coordinates, start_job

    from mindspeed_rl.building.models import build_engine
    from mindspeed_rl.trainer_state.checkpoint import load_checkpoint, save_checkpoint

    job = start_job(world, model, FLAGS)
    engine = build_engine(job, "policy", 1)
    found = []
    for folder in folders:
        with torch.no_grad():
            for param in engine.named_parameters().values():
                param.fill_(float("nan"))
        loaded = load_checkpoint(folder, engine, CheckpointConfig())
        floats = {name: p.detach().float() for name, p in engine.named_parameters().items()}
        found.append((in_hf_coordinates(job, floats), loaded.step, loaded.notes))
    save_checkpoint(save, 3, engine, {})
    return found


def test_load_takes_other_formats_and_layouts(tmp_path: Path) -> None:
    """Classic of MindSpeed-LLM, and both of ours; what the run then saves is converted back."""
    model = write_model("deepseek", tmp_path / "model")
    hf = hf_tensors(model)
    theirs = Classic(tp=2, pp=2, ep=2, extend=True, grouped=True)
    write_classic(theirs, hf, config_of(model), tmp_path / "theirs")
    hf_to_mg(model, tmp_path / "classic", ["--target-pipeline-parallel-size", "4"])
    hf_to_mg(model, tmp_path / "dist", ["--ckpt-format", "torch_dist"])
    folders = [str(tmp_path / name) for name in ("theirs", "classic", "dist")]
    args = (str(model), folders, str(tmp_path / "saved"))
    (rank0, _) = run_ranks(load_all, 2, work_dir=tmp_path, args=args)
    wanted = {name: tensor.float() for name, tensor in hf.items()}
    formats = ("classic", "classic", "iter_")
    for (weights, step, (*before, last)), format_ in zip(rank0, formats, strict=True):
        assert_equal(weights, wanted)
        assert step == 0 and format_ in last and "from the beginning" in last
        # A converted checkpoint in the format of a run has the record of one, without checksums.
        unknown = ["has no checksums"] if format_ == "iter_" else []
        assert [text in note for text, note in zip(unknown, before, strict=True)] == [True] * len(
            unknown
        )
    mg_to_hf(tmp_path / "saved", model, tmp_path / "back", "--verify")
    assert_equal(hf_tensors(tmp_path / "back"), hf)
    convert("--load-model-type", "mg", "--load-dir", tmp_path / "saved", "--save-dir",
            tmp_path / "again", "--hf-cfg-dir", model)  # fmt: skip
    assert (tmp_path / "again" / "latest_checkpointed_iteration.txt").read_text() == "3"
