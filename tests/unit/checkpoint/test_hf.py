"""Hugging Face checkpoints that are broken, of another model, or hold more than the model."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.conversions import edit_config, hf_tensors
from support.family_models import FAMILY_CASES, write_family_model
from support.peak_memory import peak_of

from mindspeed_rl.checkpoint.hf import check_tie, load_hf, read_tensor, weight_files
from mindspeed_rl.checkpoint.names import check_names, mtp_tensors, nearest_name
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.models.hf_files import INDEX
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.spec import read_hf_config
from mindspeed_rl.weight_layouts.hf_file import HfFileLayout
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

FP8 = torch.float8_e4m3fn
MTP = "model.layers.4.eh_proj.weight"


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards and an index; a multi-token-prediction layer behind the four of the model."""
    folder = tmp_path_factory.mktemp("checkpoints") / "deepseek"
    write_family_model(FAMILY_CASES["deepseek"], folder)
    weights = load_file(folder / "model.safetensors")
    weights |= {
        MTP: torch.randn(32, 64).to(torch.bfloat16),
        "model.layers.4.embed_tokens.weight": torch.randn(67, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    shard(folder, weights)
    edit_config(folder, num_nextn_predict_layers=1)
    return folder


def shard(folder: Path, weights: dict[str, torch.Tensor], count: int = 2) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    names, weight_map = sorted(weights), {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = names[len(names) * number // count : len(names) * (number + 1) // count]
        save_file({name: weights[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def layout_of(folder: Path) -> MegatronLayout:
    spec = spec_from_hf_config(read_hf_config(folder))
    parallel = ParallelLayout.build(world=1, stages=even_stages(spec.num_layers))
    return MegatronLayout(spec, parallel, 8)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The folder as one rank of the trainer sees it."""
    layout = layout_of(folder)
    params = {
        name: torch.full(shape, torch.nan, dtype=dtype)
        for name, shape in layout.local_shapes(0).items()
    }
    load_hf(folder, layout, 0, params, left_out=mtp_tensors(layout.spec, weight_files(folder)))
    return params


def test_only_layers_of_the_model_are_loaded(deepseek: Path) -> None:
    """Layers of multi-token prediction and buffers of old versions are left out, by name."""
    files = weight_files(deepseek)
    spec = spec_from_hf_config(read_hf_config(deepseek))
    assert mtp_tensors(spec, files) == [MTP, "model.layers.4.embed_tokens.weight"]
    params = load(deepseek)
    assert not any(p.isnan().any() for p in params.values())
    kept = read_tensor(files[MTP], MTP)
    assert kept.dtype == torch.bfloat16
    assert torch.equal(kept, hf_tensors(deepseek)[MTP])


def test_layers_behind_the_last_need_the_config_to_say_so(deepseek: Path, tmp_path: Path) -> None:
    folder = copy(deepseek, tmp_path)
    edit_config(folder, num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match=r"2 unknown: model\.layers\.4\.eh_proj"):
        load(folder)


def copy(source: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    return folder


@pytest.mark.parametrize(
    ("value", "told"),
    [(math.nan, "NaN in 1 of"), (math.inf, "infinity in 1 of"), (-3e37, "the value -3e+37")],
)
def test_weights_that_cannot_be_are_named_with_their_file(
    deepseek: Path, value: float, told: str, tmp_path: Path
) -> None:
    """NaN, infinities, and values whose products overflow; one row, that few prompts may touch."""
    folder = copy(deepseek, tmp_path)

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["model.embed_tokens.weight"][11, 2] = value

    edit_weights(folder, spoil)
    with pytest.raises(UsageError, match=r"model\.embed_tokens\.weight holds ") as refused:
        load(folder)
    assert told in str(refused.value) and "rank 0" in str(refused.value)
    assert FIRST in str(refused.value) and "--hf-checkpoint" in str(refused.value)


FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
EXPERT = "model.layers.2.mlp.experts.3.gate_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"


def edit_index(folder: Path, **placed: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= placed
    (folder / INDEX).write_text(json.dumps(index))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = hf_tensors(folder)
    change(weights)
    shard(folder, weights)


# what is damaged -> the damage, and what the message names
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda f: os.truncate(f / SECOND, 999), SECOND),
    "empty": (lambda f: os.truncate(f / FIRST, 0), FIRST),
    "lost shard": (lambda f: (f / SECOND).unlink(), SECOND),
    "no index": (lambda f: (f / INDEX).write_text("{}"), INDEX),
    "misplaced": (lambda f: edit_index(f, **{"model.norm.weight": FIRST}), "model.norm.weight"),
    "lost index": (lambda f: (f / INDEX).unlink(), INDEX),
    "wider": (lambda f: edit_config(f, intermediate_size=56), "gate_proj.weight"),
    "renamed": (
        lambda f: edit_weights(f, lambda w: w.update({"norm.expert": w.pop(EXPERT)})),
        f"1 of 93 tensors are missing: {EXPERT}; 1 unknown: norm.expert",
    ),
    "fp8": (lambda f: edit_weights(f, lambda w: w.update({UP: w[UP].to(FP8)})), UP),
    "scales": (
        lambda f: edit_weights(f, lambda w: w.update({f"{UP}_scale_inv": torch.ones(1)})),
        f"{UP}_scale_inv",
    ),
    "quantised": (
        lambda f: edit_config(f, quantization_config={"quant_method": "fp8"}),
        "quantization_config",
    ),
    "unknown": (lambda f: edit_config(f, architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_broken_checkpoints_are_told(deepseek: Path, tmp_path: Path, damage: str) -> None:
    folder = copy(deepseek, tmp_path)
    spoil, named = DAMAGES[damage]
    spoil(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UsageError, match=re.escape(named)):
        load(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_weights_are_cast_to_the_parameter(deepseek: Path) -> None:
    exact, rounded = load(deepseek), load(deepseek, torch.bfloat16)
    assert all(torch.equal(rounded[name], p.to(torch.bfloat16)) for name, p in exact.items())


def test_names_are_checked_with_counts_and_the_nearest() -> None:
    """Buffers and a tied head are no finding; words count more than numbers."""
    known = [f"model.layers.{i}.experts.{e}.up.weight" for i in range(20) for e in range(8)]
    check_names("here", [*known, "lm_head.weight", "model.layers.0.rotary_emb.inv_freq"], known)
    wrong = "model.layers.17.expert.5.up.weight"
    with pytest.raises(UsageError, match=r"17\.experts\.5"):
        check_names("here", [*known[1:], wrong], known)
    assert nearest_name("norm.weight", [*known, "model.norm.weight"]) == "model.norm.weight"


def test_loading_keeps_one_rectangle_in_memory(tmp_path: Path) -> None:
    """24 files of 4 MiB: the model has 96 MiB."""
    shapes = {f"w{i}": (1024, 1024) for i in range(24)}
    shard(tmp_path, {name: torch.ones(shape) for name, shape in shapes.items()}, len(shapes))
    params = {name: torch.ones(shape) for name, shape in shapes.items()}

    def load(names: Collection[str]) -> None:
        left_out = shapes.keys() - names
        layout = HfFileLayout({name: shapes[name] for name in names})
        load_hf(tmp_path, layout, 0, {name: params[name] for name in names}, left_out)

    def copy_all() -> None:
        _ = [tensor.clone() for tensor in hf_tensors(tmp_path).values()]

    first = partial(load, ["w0"])
    assert peak_of(copy_all, first) > 90 << 20, "a copy of the model is seen"
    assert peak_of(partial(load, list(shapes)), first) < 12 << 20


def test_a_head_of_its_own_beside_a_tied_config_is_refused(
    tied_model: Path, tmp_path: Path
) -> None:
    """transformers would use it, the tied model would not; equal heads are the embedding again."""
    folder = tmp_path / "model"
    shutil.copytree(tied_model, folder)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    check_tie("model", weight_files(folder), weights)
    save_file(weights | {"lm_head.weight": embedding + 1.0}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        check_tie("model", weight_files(folder), weights)
