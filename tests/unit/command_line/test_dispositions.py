"""What a run says of all its flags, at its start and in its dry run."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.checked_runs import check_rl_run, write_inputs

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.command_line.dispositions import disposition_lines
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.job import flag_lines
from mindspeed_rl.metrics.telemetry import log_description

FLAGS = (
    "--hf-checkpoint x --prompt-data y --tensor-model-parallel-size 2 --swiglu --split 9,1,0 "
    "--use-ascend-coc --coc-mode 2 --reuse-fp32-param --num-experts 8 --bf16 --fp16 --nosuch 3"
)


def test_every_flag_is_counted_and_those_gone_without_are_named():
    parsed = parse(RLRunConfig, FLAGS.split(), "test", keep_refused=True)
    assert parsed.honoured == (
        "--hf-checkpoint", "--prompt-data", "--tensor-model-parallel-size", "--bf16",
    )  # fmt: skip
    assert [text.split()[0:3] for text in parsed.refused] == [
        ["unknown", "flag", "--nosuch;"], ["--fp16", "is", "refused:"],
    ]  # fmt: skip
    counts, *rest = disposition_lines(parsed, parsed.ignored)
    assert counts == (
        "flags: 4 honoured, 2 compared with the model, 1 without meaning here, 3 not available here"
    )
    coc, reuse, ignored = rest
    assert coc.startswith("without --use-ascend-coc, --coc-mode 2: matrix products")
    assert reuse.startswith("without --reuse-fp32-param: optimizer states")
    assert "--swap-optimizer" in reuse
    assert ignored == "flags without meaning here: --split 9,1,0"


# As scripts of MindSpeed-LLM pass them -> a word of what happens instead
GONE_WITHOUT = {
    "--gemm-gradient-accumulation-fusion": "gradients",
    "--overlap-param-gather": "gathered",
    "--moe-permutation-async-comm": "dispatcher",
    "--disable-gloo-group": "gloo",
    "--hccl-slice-size 10485760": "gloo",
    "--smart-swap": "--swap-optimizer",
    "--virtual-optimizer all": "--swap-optimizer",
    "--virtual-optimizer 1.5 2 0 0": "--swap-optimizer",
}


@pytest.mark.parametrize("typed", GONE_WITHOUT)
def test_what_saves_time_or_memory_elsewhere_is_gone_without_and_told(typed):
    """The run is that of the same command line without the flag, and one line says what is not."""
    rest = ["--hf-checkpoint", "x", "--use-distributed-optimizer"]
    plain = parse(RLRunConfig, rest, "test")
    parsed = parse(RLRunConfig, [*typed.split(), *rest], "test", keep_refused=True)
    assert parsed.config == plain.config and not parsed.refused
    counts, *lines = disposition_lines(parsed, parsed.ignored)
    (line,) = [line for line in lines if line.startswith(f"without {typed}: ")]
    assert GONE_WITHOUT[typed] in line
    assert "1 not available here" in counts and typed not in str(parsed.honoured)


def test_flags_with_one_reason_are_one_line():
    parsed = parse(RLRunConfig, ["--disable-gloo-group", "--hccl-slice-size", "8"], "test")
    counts, line = disposition_lines(parsed, parsed.ignored)
    assert counts == "flags: 2 not available here"
    assert line.startswith("without --disable-gloo-group, --hccl-slice-size 8: ")


def test_flags_of_a_model_are_compared_and_not_honoured():
    """Those that are compared with it, and those with which every supported model agrees."""
    script = (
        "--num-layers 2 --hidden-size 64 --group-query-attention --num-query-groups 2 --swiglu "
        "--max-position-embeddings 256 --disable-bias-linear --position-embedding-type rope "
        "--normalization RMSNorm --norm-epsilon 1e-6 --lr 1e-6"
    )
    parsed = parse(RLRunConfig, script.split(), "test")
    assert parsed.honoured == ("--lr",) and not parsed.ignored
    assert disposition_lines(parsed, parsed.ignored) == [
        "flags: 1 honoured, 10 compared with the model"
    ]


@pytest.mark.parametrize(("given", "told"), [(255, False), (256, False), (512, True)])
def test_more_positions_than_the_model_has_are_told(tmp_path, given, told):
    """Fewer say nothing wrong: a script may use a part of them."""
    plan = check_rl_run(write_inputs(tmp_path))
    flags = ["--max-position-embeddings", str(given)]
    lines = flag_lines(parse(RLRunConfig, flags, "test"), plan, ())
    assert [line for line in lines if "positions" in line or "position-emb" in line] == [
        "note: --max-position-embeddings 512: the config.json of the model says 256, and that is "
        "the limit"
    ] * told


def test_the_start_of_a_run_prints_them(tmp_path, capsys):
    plan = check_rl_run(write_inputs(tmp_path))
    parsed = parse(RLRunConfig, FLAGS.split()[:-3], "test")
    job = SimpleNamespace(
        config=parsed.config, plan=plan, platform=SimpleNamespace(name="npu"),
        ignored=parsed.ignored, flag_notes=("flags: a", "without b"), log_rank0=print_lines,
    )  # fmt: skip
    log_description(cast(Any, job), "batch")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == ["batch", "flags: a", "without b"]


def print_lines(*lines):
    print("\n".join(lines))


def test_a_malformed_value_does_not_hide_what_is_refused():
    flags = [*FLAGS.split(), "--o2-optimizer", "--micro-batch-size", "x"]
    flags += ["--lr", "y", "--bf16", "2", "--vllm-seed", "1", "2", "--rl-benchmark-lengths", "3"]
    with pytest.raises(UsageError) as found:
        parse(RLRunConfig, flags, "test", keep_refused=True)
    lines = found.value.mistakes
    wanted = ["--nosuch", "--o2-optimizer", "--vllm-seed", "--micro-batch-size", "--lr", "--bf16"]
    places = [next(i for i, line in enumerate(lines) if flag in line) for flag in wanted]
    assert places == sorted(places) and len({*places}) == len(wanted)


def test_flags_that_are_idle_on_the_device_are_counted_once():
    parsed = parse(
        RLRunConfig, ["--lr", "1e-5", "--overlap-grad-reduce", "--moe-grouped-gemm"], "test"
    )
    idle = ["--overlap-grad-reduce, --moe-grouped-gemm (the device has no such kernels)"]
    counts, named = disposition_lines(parsed, idle)
    assert "1 honoured" in counts and "2 without meaning here" in counts and idle[0] in named
