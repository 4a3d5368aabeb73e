"""A DeepSeek checkpoint through the trainer and out again: weights, types, config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.conversions import config_of, hf_tensors
from support.family_models import FAMILY_CASES, write_family_model
from support.spawn import run_ranks
from support.training_worlds import start_job

from mindspeed_rl.launch.bootstrap import World

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
MTP = {
    "model.layers.4.eh_proj.weight": torch.randn(32, 64),
    "model.layers.4.enorm.weight": torch.ones(32, dtype=torch.float16),
}
LAYOUT = (
    *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    *("--expert-tensor-parallel-size", "1", "--expert-model-parallel-size", "2"),
    *("--make-vocab-size-divisible-by", "8"),
)


def export_world(world: World, model: str, exports: Sequence[tuple[str, list[str]]]) -> None:
    """Rank function: load the model and export it, once for each (directory, flags)."""
    from mindspeed_rl.building.models import build_engine
    from mindspeed_rl.rl.export import export_policy

    for target, flags in exports:
        job = start_job(world, model, [*LAYOUT, *flags])
        engine = build_engine(job, "policy", 1)
        export_policy(job, engine, target, 3)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source, and three exports of it beside it."""
    root = tmp_path_factory.mktemp("round-trip")
    source = write_family_model(FAMILY_CASES["deepseek"], root / "source")
    file = source / "model.safetensors"
    save_file(load_file(file) | MTP, file, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    for key in ("scoring_func", "topk_method"):  # as transformers 5 saves it
        config.pop(key, None)
    config["num_nextn_predict_layers"] = 1
    (source / "config.json").write_text(json.dumps(config))
    jobs = {"fp32": [], "bf16": ["--bf16"], "with-mtp": ["--keep-mtp", "--bf16"]}
    pairs = [(str(root / name), flags) for name, flags in jobs.items()]
    run_ranks(export_world, 2, work_dir=root, args=(str(source), pairs))
    return root


def test_fp32_is_bit_identical(exports: Path) -> None:
    source, found = hf_tensors(exports / "source"), hf_tensors(exports / "fp32")
    assert found.keys() == source.keys() - MTP.keys()
    for name, weight in found.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, source[name]), name


@pytest.mark.parametrize("name", ["bf16", "with-mtp"])
def test_the_router_bias_stays_fp32_in_bf16(exports: Path, name: str) -> None:
    """It decides which expert is chosen; rounding it would route other than the trainer did."""
    source, found = hf_tensors(exports / "source"), hf_tensors(exports / name)
    assert found[BIAS].dtype == torch.float32
    assert torch.equal(found[BIAS], source[BIAS])
    assert not torch.equal(source[BIAS], source[BIAS].to(torch.bfloat16).float())
    for key, weight in found.items():
        if key not in MTP and not key.endswith("e_score_correction_bias"):
            assert weight.dtype == torch.bfloat16, key
            assert torch.equal(weight, source[key].to(torch.bfloat16)), key


def test_multi_token_prediction_is_kept_as_it_was(exports: Path) -> None:
    found = hf_tensors(exports / "with-mtp")
    for name, weight in MTP.items():
        assert found[name].dtype == weight.dtype
    assert torch.equal(found["model.layers.4.enorm.weight"], MTP["model.layers.4.enorm.weight"])
    source = hf_tensors(exports / "source")
    assert all(torch.equal(found[name], source[name]) for name in MTP)


@pytest.mark.parametrize(
    ("name", "dtype", "num_mtp"),
    [("fp32", "float32", 0), ("bf16", "bfloat16", 0), ("with-mtp", "bfloat16", 1)],
)
def test_the_config_declares_what_is_there(
    exports: Path, name: str, dtype: str, num_mtp: int
) -> None:
    """vLLM routes by softmax, silently, without the first two."""
    config = config_of(exports / name)
    assert config["scoring_func"] == "sigmoid"
    assert config["topk_method"] == "noaux_tc"
    assert config["dtype"] == dtype
    assert config["num_nextn_predict_layers"] == num_mtp
    changed = {"scoring_func", "topk_method", "dtype", "num_nextn_predict_layers"}
    before = config_of(exports / "source")
    assert {k: v for k, v in config.items() if k not in changed} == {
        k: v for k, v in before.items() if k not in changed
    }
