"""Models and checkpoints for tests of conversions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.classic_writer import Classic, write_classic
from support.family_models import FAMILY_CASES, write_family_model

from mindspeed_rl.convert.command import run_conversion
from mindspeed_rl.convert.options import parse_options

FP8_BLOCK = 16


def convert(*argv: object) -> list[str]:
    """Run the tool in this process; what it says."""
    said: list[str] = []
    run_conversion(parse_options([*map(str, argv), "--no-progress"]), said.append)
    return said


def config_of(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of config.json."""
    (folder / "config.json").write_text(json.dumps(config_of(folder) | changes))


def hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face checkpoint."""
    return {
        n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()
    }


def write_model(name: str, folder: Path, **changes: object) -> Path:
    """A tiny bf16 model of a family case, 68 ids, router biases in fp32."""
    case = FAMILY_CASES[name]
    case = replace(case, changes={**case.changes, "vocab_size": 68, **changes})
    write_family_model(case, folder)
    weights = {
        n: t if n.endswith("correction_bias") else t.to(torch.bfloat16)
        for n, t in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, dtype="bfloat16")
    return folder


def add_mtp(folder: Path) -> None:
    """One layer of multi-token prediction behind the model, as DeepSeek publishes it."""
    weights = load_file(folder / "model.safetensors")
    config = config_of(folder)
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    for name in [name for name in weights if name.startswith(last)]:
        copy = weights[name]
        weights[name.replace(last, new)] = drawn(*copy.shape).to(copy.dtype)
    weights |= {f"{new}{n}.weight": drawn(hidden) for n in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{new}eh_proj.weight"] = drawn(hidden, 2 * hidden)
    weights[f"{new}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{new}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, num_nextn_predict_layers=1)


def quantise(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Matrices of the layers as FP8 with a factor per block; what they mean, in bf16."""
    folder.mkdir()
    meant, stored = {}, {}
    for name, tensor in hf_tensors(source).items():
        if tensor.dim() != 2 or "layers" not in name or "gate.weight" in name:
            meant[name] = stored[name] = tensor
            continue
        numbers, factors, values = _quantised(tensor.float())
        stored |= {name: numbers, f"{name}_scale_inv": factors}
        meant[name] = values
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    block = {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK], "fmt": "e4m3"}
    config = config_of(source) | {"quantization_config": block}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def _quantised(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 numbers, a factor per block, and their product in bf16, block by block."""
    rows, columns = matrix.shape
    numbers = torch.zeros_like(matrix, dtype=torch.float8_e4m3fn)
    factors = torch.zeros(-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    values = torch.zeros_like(matrix, dtype=torch.bfloat16)
    for i in range(factors.shape[0]):
        for j in range(factors.shape[1]):
            block = (
                slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK),
                slice(j * FP8_BLOCK, (j + 1) * FP8_BLOCK),
            )
            factors[i, j] = matrix[block].abs().max() / 448
            numbers[block] = (matrix[block] / factors[i, j]).to(torch.float8_e4m3fn)
            values[block] = (numbers[block].float() * factors[i, j]).to(torch.bfloat16)
    return numbers, factors, values


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """The same names, types and bits."""
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def file_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def states_of(folder: Path) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """(file, chunk) -> tensors of a classic checkpoint, by torch's own reader."""
    found = {}
    for path in sorted(folder.glob("iter_*/mp_rank_*/model_optim_rng.pt")):
        state = torch.load(path, map_location="cpu", weights_only=False)
        for key in state:
            if key.startswith("model"):
                found[path.parent.name, key] = dict(state[key])
    return found


def hf_to_mg(source: Path, target: Path, flags: Sequence[str]) -> list[str]:
    """Hugging Face to Megatron."""
    return convert("--load-dir", source, "--save-dir", target, *flags)


def mg_to_hf(source: Path, config: Path, target: Path, *flags: str) -> list[str]:
    """Megatron to Hugging Face."""
    return convert(
        "--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", source,
        "--hf-cfg-dir", config, "--save-dir", target, *flags,
    )  # fmt: skip


def assert_as_written(
    layout: Classic, model: Path, wanted: Mapping[str, torch.Tensor], ours: Path
) -> None:
    """``ours`` has the files, names, types and bits of what an independent writer makes.

    What that writer made is left beside it, in ``theirs``.
    """
    write_classic(layout, wanted, config_of(model), ours.with_name("theirs"))
    found, expected = states_of(ours), states_of(ours.with_name("theirs"))
    assert found.keys() == expected.keys()
    for key, state in expected.items():
        assert_equal(found[key], state)
