"""check_mapping: keys and elements exactly once, and every planted fault is found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from check_mapping import check_layout, check_tensors, representatives, tensor_shapes
from safetensors.torch import load_file, save_file
from support.architecture import ROOT
from support.family_models import FAMILY_CASES, write_family_model
from support.published import PUBLISHED, published_config

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.models.registry import spec_from_hf_config, weight_table
from mindspeed_rl.models.rules import Cut, WeightRow
from mindspeed_rl.models.spec import ModelSpec, read_hf_config
from mindspeed_rl.models.tensors import tensor_groups
from mindspeed_rl.weight_layouts.base import TableLayout
from mindspeed_rl.weight_layouts.megatron import MegatronLayout


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: write_family_model(case, root / name) for name, case in FAMILY_CASES.items()}


def spec_at(folder: Path) -> ModelSpec:
    return spec_from_hf_config(read_hf_config(folder))


# --- keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_every_key_of_every_family_is_in_its_table(case: str, checkpoints: dict[str, Path]) -> None:
    """Names and shapes of what transformers saves."""
    folder = checkpoints[case]
    spec, shapes = spec_at(folder), tensor_shapes(folder)
    assert check_tensors(spec, shapes) == []
    expected = {name: group.shape for group in tensor_groups(spec) for name in group.names()}
    assert expected == shapes


def test_wrong_keys_name_their_rows(checkpoints: dict[str, Path]) -> None:
    """Unknown ones the nearest row, missing ones and wrong shapes their row, one line per kind."""
    folder = checkpoints["deepseek"]
    spec, shapes = spec_at(folder), tensor_shapes(folder)
    for layer in (1, 2, 3):
        renamed = f"model.layers.{layer}.mlp.experts.2.down_proj.weight"
        shapes[renamed.replace("down_proj", "down_project")] = shapes.pop(renamed)
    shapes["lm_head.weight"] = (66, 32)
    unknown, missing, wrong = check_tensors(spec, shapes)
    row = "row decoder.layers.{l}.mlp.experts.local_experts.{e}.linear_fc2.weight"
    assert "mlp.experts.2.down_project.weight and 2 more" in unknown and row in unknown
    assert "mlp.experts.2.down_proj.weight and 2 more" in missing and row in missing
    assert "lm_head.weight: shape (66, 32)" in wrong and "row output_layer.weight" in wrong


def test_what_loading_leaves_out_is_no_finding(checkpoints: dict[str, Path]) -> None:
    """Layers of MTP, buffers of old transformers, the head of a tied model; only there."""
    folder = checkpoints["deepseek"]
    spec, shapes = spec_at(folder), tensor_shapes(folder)
    extras: dict[str, tuple[int, ...] | None] = {
        "model.layers.4.eh_proj.weight": (32, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": (2,),
    }
    assert check_tensors(replace(spec, num_mtp_layers=1), shapes | extras) == []
    (finding,) = check_tensors(spec, shapes | extras)
    assert finding.startswith("model.layers.4.eh_proj.weight: not in the table")
    tied = checkpoints["qwen2-tied"]
    head: dict[str, tuple[int, ...] | None] = {"lm_head.weight": (67, 32)}
    assert check_tensors(spec_at(tied), tensor_shapes(tied) | head) == []


def test_an_index_alone_is_enough(tmp_path: Path) -> None:
    """Names of DeepSeek-V3's 45,395 tensors and no weights; one is lost."""
    spec = spec_from_hf_config(published_config("deepseek-v3"))
    names = [name for group in tensor_groups(spec) for name in group.names()]
    lost = names.pop(40_000)
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00163.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (finding,) = check_tensors(spec, tensor_shapes(tmp_path))
    assert finding.startswith(f"{lost}: missing from the checkpoint; row decoder.layers.{{l}}.mlp")


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    "kept", [-1, 40, 3, *("nonsense", "[]", '{"w": 3}', '{"w": {"shape": []}}')]
)
def test_broken_files_are_refused(
    kept: int | str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A part of a file, or another header; and no file at all."""
    with pytest.raises(UsageError, match=str(tmp_path)):
        tensor_shapes(tmp_path)
    content = (checkpoints["qwen3"] / "model.safetensors").read_bytes()
    spoilt = content[:kept] if isinstance(kept, int) else header(kept)
    (tmp_path / "model.safetensors").write_bytes(spoilt)
    with pytest.raises(UsageError, match=r"model\.safetensors: "):
        tensor_shapes(tmp_path)


# --- elements ----------------------------------------------------------------------------------


def published_layouts(model: str) -> Iterator[TableLayout]:
    """Layouts as real jobs have them."""
    spec = spec_from_hf_config(published_config(model))
    stages = even_stages(spec.num_layers, 2, 2)
    if spec.moe:
        grid = ParallelLayout.build(world=64, stages=stages, tp=4, cp=2, ep=4, etp=2)
        yield MegatronLayout(spec, grid)
        yield VllmLayout(spec, EngineLayout(64, 2, 1), expert_multiple=256)
        yield VllmLayout(spec, EngineLayout(64, 4, 4, True))
    else:
        yield MegatronLayout(spec, ParallelLayout.build(world=32, stages=stages, tp=4, cp=2))
        yield VllmLayout(spec, EngineLayout(32, 4))


@pytest.mark.parametrize("model", ["qwen2.5-7b", "llama-3.1-8b", "qwen3-30b-a3b"])
def test_every_element_of_a_published_model_is_held_once(model: str) -> None:
    """The largest one is the command's test below."""
    for layout in published_layouts(model):
        assert check_layout(layout) == []


def test_one_rank_of_each_kind_is_checked() -> None:
    """Two data-parallel ranks are the same; so are engines. Experts make more kinds."""
    spec = spec_from_hf_config(published_config("qwen3-30b-a3b") | {"num_hidden_layers": 2})
    grid = ParallelLayout.build(world=16, stages=even_stages(2, 2), tp=2, ep=4, etp=1)
    assert list(representatives(MegatronLayout(spec, grid))) == [*range(4), *range(8, 12)]
    assert list(representatives(VllmLayout(spec, EngineLayout(16, 2, 2)))) == [0, 1, 2, 3]


def shifted(cut: Cut) -> Cut:
    return replace(cut, param_box=Box((1, *cut.param_box.lo[1:]), cut.param_box.size))


def on_top(cut: Cut) -> Cut:
    return replace(cut, param_box=Box((0, 0), cut.param_box.size))


# row, method, what it does instead (given its real form, the spec and the share), finding
WRONG_ROWS: dict[str, tuple[str, str, Callable[..., object], str]] = {
    "first share only": ("mlp.linear_fc2.weight", "cuts",
                         lambda real, spec, share: real(spec, replace(share, tp=0)),
                         "down_proj.weight .* has 768 elements that"),
    "up over gate": ("mlp.linear_fc1.weight", "cuts",
                     lambda real, *at: map(on_top, real(*at)), "linear_fc1.weight .* filled twice"),
    "without up": ("mlp.linear_fc1.weight", "cuts",
                   lambda real, *at: [*real(*at)][:1], "up_proj.weight .* has 1536 elements that"),
    "secret padding": ("word_embeddings.weight", "padding", lambda real, *at: 0,
                       "declared padding: 0"),
    "one row too far": ("mlp.linear_fc2.weight", "cuts",
                        lambda real, *at: map(shifted, real(*at)), "linear_fc2.weight .* is left"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG_ROWS)
def test_a_wrong_row_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    suffix, method, instead, finding = WRONG_ROWS[fault]
    spec = small_qwen3()
    (row,) = (r for r in weight_table("qwen3").trainer_rows(spec) if r.param.endswith(suffix))
    kind = next(base for base in type(row).__mro__ if method in vars(base))
    real = getattr(kind, method)

    def changed(self: WeightRow, *at: object) -> object:
        if not self.param.endswith(suffix):
            return real(self, *at)
        return instead(partial(real, self), *at)

    monkeypatch.setattr(kind, method, changed)
    grid = ParallelLayout.build(world=2, stages=even_stages(2), tp=2)
    findings = check_layout(MegatronLayout(spec, grid, 128))
    assert any(re.search(finding, line) for line in findings), findings


def test_a_tensor_that_no_row_fills_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = VllmLayout(small_qwen3(), EngineLayout(1, 1))
    kept = {name: shape for name, shape in layout.hf_shapes.items() if "k_norm" not in name}
    monkeypatch.setattr(VllmLayout, "hf_shapes", kept)
    finding, *_ = check_layout(VllmLayout(small_qwen3(), EngineLayout(1, 1)))
    assert re.search(r"VllmLayout: its tensors are not the table's.*k_norm", finding)


def small_qwen3() -> ModelSpec:
    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 67}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return spec_from_hf_config(published_config("qwen3-8b") | small | heads)


# --- the command -------------------------------------------------------------------------------


def check_mapping(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/check_mapping.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_the_command_on_a_config() -> None:
    done = check_mapping(
        "--hf-config", str(PUBLISHED["deepseek-v3"]),
        "--train", "tp=8,pp=8,ep=32,etp=1,num_layer_list=7-8-8-8-8-8-8-6",
        "--rollout", "tp=8,dp=4,ep=32", "--world", "256",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: weights are quantised" in done.stdout
    total = done.stdout.splitlines()[-2].split()
    # 14,848 elements of router bias have 4 bytes
    assert total == ["total", "45395", "671,026,419,200", f"{2 * 671_026_419_200 + 29_696:,}"]
    assert done.stdout.endswith("every key and element exactly once\n")


def test_the_command_on_a_checkpoint(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Good, then with a renamed key: status 1, and the row that comes nearest."""
    good = checkpoints["qwen3-moe"]
    rollout = ("--rollout", "tp=2", "--pad-experts", "32")
    done = check_mapping("--hf-checkpoint", str(good), "--train", "tp=2,pp=2,ep=2,etp=1", *rollout)
    assert done.returncode == 0, done.stdout + done.stderr
    weights = load_file(good / "model.safetensors")
    weights["model.layers.0.mlp.router.weight"] = weights.pop("model.layers.0.mlp.gate.weight")
    save_file(weights, tmp_path / "model.safetensors")
    done = check_mapping("--hf-checkpoint", str(tmp_path), "--hf-config", str(good / "config.json"))
    assert done.returncode == 1
    assert re.search("FINDING: model.layers.0.mlp.router.weight: not in the table", done.stdout)
    assert re.search("FINDING: model.layers.0.mlp.gate.weight: missing .*router", done.stdout)
    assert done.stdout.endswith("2 findings\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--hf-checkpoint"),
        (("--hf-config", "no.json"), "--hf-config no.json"),
        (("--hf-config", "README.md"), "--hf-config README.md"),
        (("--hf-config", "[]"), "--hf-config"),
        (("--hf-config", "{"), "--hf-config"),
        (("--hf-config", '{"architectures": "Qwen3"}'), "architectures 'Qwen3'"),
        (("--train", "pp=5"), "--pipeline-model-parallel-size 5"),
        (("--train", "tp=3"), "--tensor-model-parallel-size 3"),
        (("--train", "pp=2", "--world", "3"), "world size 3"),
    ],
)
def test_the_command_refuses(arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    """No traceback; a config in place of its file is written to one."""
    given = list(arguments)
    if given and given[0] != "--hf-config":
        given += ["--hf-config", str(PUBLISHED["qwen3-8b"])]
    elif given and given[1][0] in "[{":
        (tmp_path / "config.json").write_text(given[1])
        given[1] = str(tmp_path / "config.json")
    done = check_mapping(*given)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert named in " ".join(done.stderr.split()), done.stderr
