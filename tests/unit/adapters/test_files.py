"""What is written in PEFT's format, and first values that do not depend on the layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_rl.adapters.modules import first_factors
from mindspeed_rl.adapters.peft_files import peft_config, write_peft
from mindspeed_rl.algorithms.lora import LoraSettings
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.export_names import adapter_folder

TENSORS = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 3)}


def test_a_folder_is_replaced_and_others_files_are_kept(tmp_path: Path) -> None:
    folder = adapter_folder(str(tmp_path / "hf"))
    assert folder == tmp_path / "hf-adapter"
    lora = LoraSettings(2, lora_alpha=5.0, lora_target=("up_proj",), lora_rslora=True)
    write_peft(folder, peft_config(lora, "base", lora.layers), TENSORS)
    write_peft(
        folder,
        peft_config(lora, "/models/base", lora.layers),
        {n: 2 * t for n, t in TENSORS.items()},
    )
    assert sorted(file.name for file in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    found = load_file(folder / "adapter_model.safetensors")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], 2 * tensor) for name, tensor in TENSORS.items())
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["target_modules"] == ["up_proj"]
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 5.0, True)
    assert config["base_model_name_or_path"] == "/models/base"
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"hf-adapter.*holds other files: notes\.txt"):
        write_peft(folder, config, TENSORS)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf-adapter"], "nothing is left"


def test_alpha_of_experts_has_the_whole_scale() -> None:
    """PEFT doubles rank and alpha of joined adapters, which changes alpha / sqrt(rank)."""
    lora = LoraSettings(4, lora_alpha=6.0, lora_rslora=True)
    dense, experts = (peft_config(lora, "base", (), has_experts=flag) for flag in (False, True))
    assert (dense["lora_alpha"], dense["use_rslora"]) == (6, True)
    assert (experts["lora_alpha"], experts["use_rslora"]) == (12, False)
    plain = peft_config(LoraSettings(3, lora_alpha=5.0), "base", (), has_experts=True)
    assert plain["lora_alpha"] == pytest.approx(5.0) and not plain["use_rslora"]


def test_first_values() -> None:
    """A is uniform within 1 / sqrt(in), of its own for each name and seed; B is 0."""
    first, second = first_factors("q", (5, 400), 6, seed=1)
    assert first.shape == (6, 400) and second.shape == (5, 6)
    assert first.abs().max() <= 0.05 and first.abs().max() > 0.049
    assert abs(float(first.std()) - 0.05 / 3**0.5) < 1e-3
    assert not second.any()
    assert torch.equal(first, first_factors("q", (7, 400), 6, seed=1)[0])
    for name, seed in (("k", 1), ("q", 2)):
        assert not torch.equal(first, first_factors(name, (5, 400), 6, seed)[0])
