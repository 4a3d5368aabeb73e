"""Command lines with the flags of MindSpeed-LLM's published conversion scripts run.

Sizes are those of tiny models; flags and their order are those of the scripts.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.classic_writer import Classic, write_classic
from support.conversions import (
    add_mtp,
    assert_as_written,
    assert_equal,
    config_of,
    convert,
    hf_tensors,
    write_model,
)

from mindspeed_rl.convert.options import parse_options

ROOT = Path(__file__).resolve().parents[3]
V1_QWEN25 = """--use-mcore-models --model-type GPT --load-model-type hf --save-model-type mg
    --target-tensor-parallel-size 4 --target-pipeline-parallel-size 2 --add-qkv-bias
    --load-dir HF --save-dir MG --tokenizer-model HF/tokenizer.json --model-type-hf llama2
    --params-dtype bf16"""
V1_QWEN3_MOE = """--use-mcore-models --model-type GPT --load-model-type hf --save-model-type mg
    --target-tensor-parallel-size 1 --target-pipeline-parallel-size 2
    --target-expert-parallel-size 1 --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec
    --load-dir HF --save-dir MG --tokenizer-model HF/tokenizer.json --moe-grouped-gemm
    --params-dtype bf16 --model-type-hf qwen3-moe"""
V2_QWEN25 = """--load-model-type hf --save-model-type mg --target-tensor-parallel-size 4
    --target-pipeline-parallel-size 2 --load-dir HF --save-dir MG --model-type-hf qwen25"""
V2_QWEN3_235B = """--load-model-type hf --save-model-type mg --target-tensor-parallel-size 1
    --target-pipeline-parallel-size 4 --target-expert-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 1 --noop-layers 6,7 --load-dir HF --save-dir MG
    --moe-grouped-gemm --model-type-hf qwen3-moe"""
DEEPSEEK3 = """--moe-grouped-gemm --target-tensor-parallel-size 2 --target-pipeline-parallel-size 4
    --target-expert-parallel-size 4 --load-dir HF --save-dir MG --num-layers 16
    --mtp-num-layers 1 --num-layers-per-virtual-pipeline-stage 2 --noop-layers 11,14,15"""
QWEN2 = ("qwen2-tied", {"tie_word_embeddings": False, "num_key_value_heads": 4})
SCRIPTS = {
    "v1-qwen25": (V1_QWEN25, Classic(tp=4, pp=2)),
    "v1-qwen3-moe": (V1_QWEN3_MOE, Classic(pp=2, grouped=True)),
    "v2-qwen25": (V2_QWEN25, Classic(tp=4, pp=2)),
    "v2-qwen3-235b": (V2_QWEN3_235B, Classic(pp=4, ep=4, per_chunk=1, noop=(6, 7), grouped=True)),
    "deepseek3": (
        DEEPSEEK3, Classic(tp=2, pp=4, ep=4, per_chunk=2, noop=(11, 14, 15), grouped=True, mtp=1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_from_hugging_face(script: str) -> None:
    """They ask for these layouts; what is written for a layout is in test_checkpoint.py."""
    text, layout = SCRIPTS[script]
    found = parse_options(text.split())
    plain = parse_options(["--load-dir", "HF", "--save-dir", "MG", *layout.flags()])
    assert found.layout == plain.layout
    assert found.checkpoint.mtp_num_layers == layout.mtp


def test_a_script_is_converted(tmp_path: Path) -> None:
    model = write_model("deepseek", tmp_path / "HF", num_hidden_layers=13)
    add_mtp(model)
    text, layout = SCRIPTS["deepseek3"]
    convert(*text.replace("HF", str(model)).replace("MG", str(tmp_path / "MG")).split())
    assert_as_written(layout, model, hf_tensors(model), tmp_path / "MG")


def test_scripts_to_hugging_face(tmp_path: Path) -> None:
    """v2 names the config; v1 takes it from --save-dir and writes into a folder there."""
    model = write_model(QWEN2[0], tmp_path / "hf", **QWEN2[1])
    hf = hf_tensors(model)
    write_classic(Classic(tp=2, pp=2), hf, config_of(model), tmp_path / "mg")
    v2 = f"""--load-model-type mg --save-model-type hf --load-dir {tmp_path}/mg
        --save-dir {tmp_path}/out --hf-cfg-dir {model} --model-type-hf qwen25"""
    convert(*v2.split())
    assert_equal(hf_tensors(tmp_path / "out"), hf)
    v1 = f"""--use-mcore-models --model-type GPT --model-type-hf llama2 --load-model-type mg
        --save-model-type hf --target-tensor-parallel-size 1 --target-pipeline-parallel-size 1
        --add-qkv-bias --load-dir {tmp_path}/mg --save-dir {model}"""
    convert(*v1.split())
    assert_equal(hf_tensors(model / "mg2hf"), hf)
    source = """--moe-grouped-gemm --source-tensor-parallel-size 2 --source-pipeline-parallel-size 2
        --source-expert-parallel-size 1 --num-layers 4"""
    more = f"--load-model-type mg --save-model-type hf --load-dir {tmp_path}/mg"
    words = f"{source} {more} --save-dir {tmp_path}/more --hf-cfg-dir {model}"
    said = convert(*words.split())
    assert_equal(hf_tensors(tmp_path / "more"), hf)
    assert "without effect, this target has no layout: --moe-grouped-gemm" in said


@pytest.mark.parametrize("page", ["docs/checkpoints.md", "README.md"])
def test_documented_commands_are_understood(page: str) -> None:
    text = (ROOT / page).read_text().replace("\\\n", " ")
    commands = re.findall(r"^python tools/convert_checkpoint\.py (.*)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        options = parse_options(command.split())
        assert options.checkpoint.load_dir and options.checkpoint.save_dir


@pytest.mark.slow
def test_the_command_itself(tmp_path: Path) -> None:
    """Exit status and streams of the script in a process of its own."""
    model = write_model("qwen3", tmp_path / "hf")
    tool = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py")]

    def run(*argv: object) -> subprocess.CompletedProcess[str]:
        command = [*tool, *map(str, argv)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    done = run("--load-dir", model, "--save-dir", tmp_path / "mg", "--verify")
    assert done.returncode == 0, done.stderr
    assert "verified: 47 tensors are bit-equal" in done.stdout
    again = run("--load-dir", model, "--save-dir", tmp_path / "mg")
    assert again.returncode == 2 and again.stderr.startswith("convert_checkpoint: --save-dir ")
