"""Conversions are bit-equal, and classic files are what MindSpeed-LLM's own converter writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.classic_writer import Classic, write_classic
from support.conversions import (
    add_mtp,
    assert_as_written,
    assert_equal,
    config_of,
    convert,
    file_bytes,
    hf_tensors,
    hf_to_mg,
    mg_to_hf,
    quantise,
    states_of,
    write_model,
)

from mindspeed_rl.convert import source, target

EIGHT = {"num_hidden_layers": 8}
LAYOUTS = {
    "tp2": ("qwen2-tied", {}, Classic(tp=2)),
    "tied-pp2": ("qwen2-tied", {}, Classic(tp=2, pp=2)),
    "uneven": ("qwen3", {}, Classic(pp=2, layer_list=(1, 3))),
    "interleaved": ("qwen3", EIGHT, Classic(pp=2, per_chunk=2)),
    "noop": ("llama-one-kv-head", {}, Classic(pp=3, noop=(2, 5))),
    "interleaved-noop": ("qwen3-moe", {"num_hidden_layers": 6, "mlp_only_layers": []},
                         Classic(pp=2, ep=2, per_chunk=2, noop=(2, 7), grouped=True)),
    "experts-cut": ("qwen3-moe", {}, Classic(tp=2, ep=2)),
    "experts-cut-grouped": ("qwen3-moe", {}, Classic(tp=2, ep=2, grouped=True)),
    "experts-whole": ("qwen3-moe", {}, Classic(tp=2, ep=4, etp_one=True, grouped=True)),
    "experts-whole-few": ("qwen3-moe", {}, Classic(tp=4, ep=2, etp_one=True)),
    "extended-grouped": ("deepseek", {}, Classic(tp=2, ep=2, pp=2, extend=True, grouped=True)),
    "extended": ("deepseek", {}, Classic(tp=2, ep=2, extend=True)),
    "split": ("deepseek", {}, Classic(tp=2, split=True)),
    "plain-query": ("deepseek-plain", {}, Classic(tp=2, pp=2)),
    "te": ("qwen3-moe", {}, Classic(ep=2, te=True, grouped=True)),
    "te-dense": ("qwen3", {}, Classic(tp=2, te=True)),
    "mtp": ("deepseek", {}, Classic(tp=2, pp=2, ep=2, grouped=True, mtp=1)),
    "mtp-one-stage": ("deepseek", {}, Classic(ep=2, mtp=1, split=True)),
    "mtp-interleaved": ("deepseek", EIGHT, Classic(pp=2, per_chunk=2, mtp=1)),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_classic_files_are_those_of_an_independent_writer(case: str, tmp_path: Path) -> None:
    """Both ways: what it wrote is read bit for bit, and what it writes is written."""
    name, changes, layout = LAYOUTS[case]
    if layout.tp == 4:
        changes = {**changes, "num_key_value_heads": 4}
    model = write_model(name, tmp_path / "model", **changes)
    if layout.mtp:
        add_mtp(model)
    hf = hf_tensors(model)
    hf_to_mg(model, tmp_path / "ours", layout.flags())
    assert_as_written(layout, model, hf, tmp_path / "ours")
    flags = ("--mtp-num-layers", str(layout.mtp))
    mg_to_hf(tmp_path / "theirs", model, tmp_path / "back", "--verify", *flags)
    assert_equal(hf_tensors(tmp_path / "back"), hf)


def test_files_with_old_names_are_read(tmp_path: Path) -> None:
    """linear_qb, linear_kvb and k_layernorm, before MindSpeed-LLM took megatron-core's names."""
    model = write_model("deepseek", tmp_path / "model")
    hf = hf_tensors(model)
    layout = Classic(tp=2, pp=2, ep=2, grouped=True, old=True)
    write_classic(layout, hf, config_of(model), tmp_path / "theirs")
    mg_to_hf(tmp_path / "theirs", model, tmp_path / "back")
    assert_equal(hf_tensors(tmp_path / "back"), hf)


@pytest.mark.parametrize(
    ("ids", "tp", "multiple", "own"),
    [(67, 2, 8, 27), (68, 4, 40, 0)],  # of 2 x 40 and of 4 x 40 rows: the last rank may have none
)
def test_a_vocabulary_is_padded_with_zeros_and_cut_again(
    ids: int, tp: int, multiple: int, own: int, tmp_path: Path
) -> None:
    model = write_model("qwen3", tmp_path / "model", vocab_size=ids, num_key_value_heads=4)
    flags = ["--target-tensor-parallel-size", f"{tp}"]
    hf_to_mg(model, tmp_path / "mg", [*flags, "--make-vocab-size-divisible-by", f"{multiple}"])
    last, hf = states_of(tmp_path / "mg")[f"mp_rank_0{tp - 1}", "model"], hf_tensors(model)
    for name, whole in (("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
                        ("output_layer.weight", "lm_head.weight")):  # fmt: skip
        assert last[name].shape[0] == 40 and not last[name][own:].any()
        assert torch.equal(last[name][:own], hf[whole][ids - own :])
    mg_to_hf(tmp_path / "mg", model, tmp_path / "back")
    assert_equal(hf_tensors(tmp_path / "back"), hf)


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3-moe", "deepseek"])
def test_megatron_to_megatron_over_both_formats(name: str, tmp_path: Path) -> None:
    """Classic TP2 -> torch_dist -> classic PP2 -> Hugging Face."""
    model = write_model(name, tmp_path / "model")
    hf_to_mg(model, tmp_path / "a", ["--target-tensor-parallel-size", "2"])
    mg = ("--load-model-type", "mg", "--hf-cfg-dir", model)
    convert(*mg, "--load-dir", tmp_path / "a", "--save-dir", tmp_path / "b", "--ckpt-format",
            "torch_dist", "--verify")  # fmt: skip
    convert(*mg, "--load-dir", tmp_path / "b", "--save-dir", tmp_path / "c",
            "--target-pipeline-parallel-size", "2")  # fmt: skip
    mg_to_hf(tmp_path / "c", model, tmp_path / "d")
    assert_equal(hf_tensors(tmp_path / "d"), hf_tensors(model))


def test_quantised_blocks_become_bfloat16(tmp_path: Path) -> None:
    """Rectangles that begin inside a block included: TP2 cuts 12 and 16 channels."""
    meant = quantise(write_model("deepseek", tmp_path / "model"), tmp_path / "fp8")
    hf_flags = ("--save-model-type", "hf", "--load-dir", tmp_path / "fp8")
    convert(*hf_flags, "--save-dir", tmp_path / "bf16", "--verify")
    assert_equal(hf_tensors(tmp_path / "bf16"), meant)
    assert "quantization_config" not in config_of(tmp_path / "bf16")
    layout = Classic(tp=2, pp=2, ep=2, extend=True, grouped=True)
    hf_to_mg(tmp_path / "fp8", tmp_path / "mg", layout.flags())
    assert_as_written(layout, tmp_path / "fp8", meant, tmp_path / "mg")


def test_mtp_is_dropped_or_kept(tmp_path: Path) -> None:
    model = write_model("deepseek", tmp_path / "model")
    add_mtp(model)
    hf = hf_tensors(model)
    flags = ("--save-model-type", "hf", "--load-dir", model)
    said = convert(*flags, "--save-dir", tmp_path / "dropped")
    left = {name: value for name, value in hf.items() if not name.startswith("model.layers.4.")}
    assert_equal(hf_tensors(tmp_path / "dropped"), left)
    assert config_of(tmp_path / "dropped")["num_nextn_predict_layers"] == 0
    assert any(f"left out: {len(hf) - len(left)} tensors of multi-token" in line for line in said)
    convert(*flags, "--save-dir", tmp_path / "kept", "--mtp-num-layers", 1)
    assert_equal(hf_tensors(tmp_path / "kept"), hf)
    assert config_of(tmp_path / "kept")["num_nextn_predict_layers"] == 1


def test_mtp_that_the_config_does_not_know_is_dropped(tmp_path: Path) -> None:
    """The config of a bf16 checkpoint may know of none, the files of a run may have some."""
    model = write_model("deepseek", tmp_path / "model")
    without = hf_tensors(model)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_bytes((model / "config.json").read_bytes())
    add_mtp(model)
    hf_to_mg(model, tmp_path / "mg", Classic(tp=2, pp=2, mtp=1).flags())
    said = mg_to_hf(tmp_path / "mg", plain, tmp_path / "back")
    assert_equal(hf_tensors(tmp_path / "back"), without)
    assert any("tensors of multi-token prediction" in line for line in said)


def test_types_are_cast_but_for_declared_ones(tmp_path: Path) -> None:
    model = write_model("deepseek", tmp_path / "model")
    hf_to_mg(model, tmp_path / "mg", ["--params-dtype", "fp32"])
    (state,) = states_of(tmp_path / "mg").values()
    assert {value.dtype for value in state.values()} == {torch.float32}
    flags = ("--params-dtype", "bf16")
    mg_to_hf(tmp_path / "mg", model, tmp_path / "back", *flags)
    assert_equal(hf_tensors(tmp_path / "back"), hf_tensors(model))


def test_safetensors_are_split_with_an_index(tmp_path: Path) -> None:
    model = write_model("qwen3", tmp_path / "model")
    flags = ("--save-model-type", "hf", "--load-dir", model, "--save-dir", tmp_path / "out")
    convert(*flags, "--max-shard-size-gb", 2e-5)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert_equal(hf_tensors(tmp_path / "out"), hf_tensors(model))
    # transformers reads it: index, config and weights belong together
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.model.norm.weight, hf_tensors(model)["model.norm.weight"])


def test_a_torch_file_that_names_code_runs_none_of_it(tmp_path: Path) -> None:
    """Arguments of a training run hold classes of libraries that are not installed here."""
    model = write_model("qwen3", tmp_path / "model")
    hf = hf_tensors(model)
    write_classic(Classic(tp=2), hf, config_of(model), tmp_path / "theirs")
    marker = tmp_path / "ran"
    for path in (tmp_path / "theirs").glob("iter_*/*/model_optim_rng.pt"):
        state = torch.load(path, weights_only=False)
        torch.save({**state, "optimizer": _Runs(str(marker))}, path)
    mg_to_hf(tmp_path / "theirs", model, tmp_path / "back")
    assert_equal(hf_tensors(tmp_path / "back"), hf)
    assert not marker.exists()


class _Runs:
    """Unpickling it creates a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


@pytest.mark.parametrize("flags", [Classic(tp=2, ep=2, pp=2, grouped=True, split=True).flags(),
                                   ["--ckpt-format", "torch_dist"]])  # fmt: skip
def test_the_size_of_blocks_changes_no_byte(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded by working on a few rows at a time: here on a few hundred bytes."""
    model = write_model("deepseek", tmp_path / "model")
    quantise(model, tmp_path / "fp8")
    hf_to_mg(tmp_path / "fp8", tmp_path / "whole", flags)
    monkeypatch.setattr(source, "BLOCK_BYTES", 300)
    largest: list[int] = []
    fill = target.OutputTensor.fill

    def noted(self: target.OutputTensor, *args: Any) -> None:
        fill(self, *args)
        values = args[-1]
        largest.append(values.nbytes if values.shape[0] > 1 else 0)

    monkeypatch.setattr(target.OutputTensor, "fill", noted)
    hf_to_mg(tmp_path / "fp8", tmp_path / "blocks", flags)
    assert 0 < max(largest) <= 300 and len(largest) > 300
    assert file_bytes(tmp_path / "blocks") == file_bytes(tmp_path / "whole")
    mg_to_hf(tmp_path / "blocks", model, tmp_path / "hf", "--verify")
