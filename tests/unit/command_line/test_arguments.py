"""The command line: help that teaches, errors that name flag, value, allowed and fix."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checked_runs import write_model
from support.published_scripts import script_flags

from mindspeed_rl.command_line.arguments import (
    ENTRIES,
    as_typed,
    build_parser,
    help_text,
    own_flags,
    parse,
)
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.engine_options import take_engine_options
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.planning.run_plan import plan_rl

ROOT = Path(__file__).resolve().parents[3]
PROGS = {run_type: prog for prog, run_type in ENTRIES.items()}
ALL_FLAGS = [
    (run_type, flag)
    for run_type in ENTRIES.values()
    for _, flags in own_flags(run_type)
    for flag in flags
]
RL_BLOCK = """
--hf-checkpoint PATH --prompt-data PATH --perform-rl-step --rl-algorithm grpo
--grpo-prompts-per-step 32 --grpo-group-size 8 --grpo-iterations 1 --grpo-clamp-eps-lower 0.2
--grpo-clamp-eps-upper 0.28 --grpo-kl-beta 0.001 --grpo-entropy-term-weight 0.0
--rl-default-temperature 1.0 --rl-default-top-p 1.0 --rl-default-top-k -1
--rl-inference-tensor-model-parallel-size 2 --rl-inference-pipeline-model-parallel-size 1
--rollout-max-response-length 1024 --reward-function math format=0.2 --vllm-max-num-seqs 256
"""

QWEN2_5_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "rope_theta": 1000000.0, "max_position_embeddings": 32768, "eos_token_id": 151645,
}  # fmt: skip


def rl(text=""):
    return parse(RLRunConfig, text.split(), PROGS[RLRunConfig])


# --- scripts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "tp", "layers", "noop"),
    [
        (script_flags("qwen3/pretrain_qwen3_8b_4K_ptd_A3.sh"), 2, 36, ""),
        (script_flags("qwen3/tune_qwen3_32b_32K_full_pack_A3_ptd.sh"), 4, 64, ""),
        (script_flags("qwen3_moe/pretrain_qwen3_235b_a22b_4k_A3_ptd.sh"), 1, 96, "94,95"),
        (script_flags("deepseek3/pretrain_deepseek3_671b_4k_A3_ptd.sh"), 2, 64, "61,62,63"),
    ],
    ids=["qwen3-8b", "qwen3-32b-tune", "qwen3-235b-a22b", "deepseek3-671b"],
)
def test_published_script_plus_rl_block_parses(script, tp, layers, noop):
    parsed = parse(RLRunConfig, [*script, *RL_BLOCK.split()], "train_rl")
    config = parsed.config
    assert config.parallel.tensor_model_parallel_size == tp
    assert (config.model.num_layers, config.model.noop_layers) == (layers, noop)
    assert config.train.bf16 and config.surrogate.eps_upper == 0.28
    assert config.rollout.rl_inference_tensor_model_parallel_size == 2
    assert config.rewards.reward_function == ("math", "format=0.2")
    assert config.engine_options == {"max_num_seqs": 256}
    assert "--tokenizer-type PretrainedFromHF" in parsed.ignored
    assert "--data-path PATH" in parsed.ignored
    assert "--qk-layernorm" in {used.flag for used in parsed.checked_arch}


def test_sft_script_parses_for_the_supervised_entry():
    own = ["--hf-checkpoint", "PATH", "--sft-data", "PATH"]
    parsed = parse(
        PretrainRunConfig,
        [*script_flags("qwen3/tune_qwen3_32b_32K_full_pack_A3_ptd.sh"), *own],
        "pretrain",
    )
    assert parsed.config.sft.stage == "sft"
    assert parsed.config.train.global_batch_size == 32


# --- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["--lr 3e-5", "--lr=3e-5", "--lr 1 --lr 3e-5"])
def test_float_spellings_and_the_last_value_counts(text):
    assert rl(text).config.train.lr == 3e-5


def test_underscores_aliases_and_negative_values():
    parsed = rl("--grpo_group_size 4 --rollout-tp=2 --reward-timeout-score -1e-3 --no_save_rng")
    assert parsed.config.rl.grpo_group_size == 4
    assert parsed.config.rollout.rl_inference_tensor_model_parallel_size == 2
    assert parsed.config.rewards.reward_timeout_score == -1e-3
    assert parsed.config.checkpoint.no_save_rng
    assert rl("--persistent-save-interval 7").config.checkpoint.save_interval == 7


def test_switch_that_is_on_by_default_is_turned_off():
    for text, shuffle in (("", True), ("--no-shuffle", False)):
        assert parse(PretrainRunConfig, text.split(), "pretrain").config.sft.shuffle is shuffle


@given(st.text(max_size=12))
@settings(deadline=None)
def test_any_text_value_survives_when_attached(value):
    parsed = parse(RLRunConfig, ["--save=" + value], "train_rl")
    assert parsed.config.checkpoint.save == value


# --- errors ------------------------------------------------------------------------------------


def test_numbers_outside_their_limits_are_refused_for_every_flag():
    limited = [(r, f) for r, f in ALL_FLAGS if f.info.limits]
    assert len(limited) > 50
    for run_type, flag in limited:
        info = flag.info
        low = info.above if info.minimum is None else math.floor(info.minimum) - 1
        high = info.below if info.maximum is None else info.maximum + 1
        for value in (low, high):
            if value is not None:
                with pytest.raises(UsageError, match=re.escape(f"of {info.limits}")):
                    parse(run_type, [flag.spellings[0], str(value)], PROGS[run_type])
        assert info.limits in flag.help.lower()


# --- engine options ----------------------------------------------------------------------------


def test_engine_options_are_json_switches_or_text():
    argv = ["--vllm-block-size", "512", "--vllm_enable_prefix_caching=true", "--vllm-enforce-eager"]
    argv += ["--vllm-scheduling-policy", "fcfs", "--lr", "1", "--vllm-stream-interval", "-1"]
    argv += ["--vllm-compilation-config", '{"level": 0}', "--vllm-block-size", "8"]
    rest, options, malformed = take_engine_options([*argv, "--vllm-a", "1", "2", "--vllm-=3"])
    assert rest == ["--lr", "1"]
    assert [line.split()[0] for line in malformed] == ["--vllm-a", "--vllm-:"]
    assert options == {
        "block_size": 8,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "scheduling_policy": "fcfs",
        "stream_interval": -1,
        "compilation_config": {"level": 0},
    }


# --- help --------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 60, 200])
@pytest.mark.parametrize("run_type", PROGS, ids=["rl", "pretrain", "score"])
def test_help_is_grouped_and_fits_the_terminal(run_type, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = build_parser(run_type, PROGS[run_type]).format_help()
    lines = text.splitlines()
    epilog = lines.index("from a pretraining script to this entry:")
    # only a flag that is wider than the help column may stick out of a narrow terminal
    wide = [line for line in lines[1:epilog] if len(line) >= columns and not re.match(" +-", line)]
    assert wide == []
    assert max(len(line) for line in lines[epilog:]) < 80
    for section, flags in own_flags(run_type):
        assert section.__doc__.splitlines()[0].rstrip(".") + ":" in lines
        for flag in flags:
            assert all(spelling in text for spelling in flag.spellings)


@pytest.mark.parametrize("run_type", PROGS, ids=["rl", "pretrain", "score"])
def test_the_index_of_the_help_leads_to_every_flag(run_type, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    prog = PROGS[run_type]
    index = help_text(run_type, prog, "")
    assert len(index.splitlines()) < 60 and max(map(len, index.splitlines())) < 80
    topics = re.findall(r"^  ([a-z-]+)  ", index, re.MULTILINE)
    assert topics[-1] == "all" and "train" in topics
    told = {topic: help_text(run_type, prog, topic) for topic in topics}
    assert told["all"] == build_parser(run_type, prog).format_help()
    for section, flags in own_flags(run_type):
        title = section.__doc__.splitlines()[0].rstrip(".") + ":"
        (home,) = (t for t, text in told.items() if text.startswith(title))
        for flag in flags:
            assert all(spelling in told[home] for spelling in flag.spellings)
            alone = help_text(run_type, prog, flag.spellings[-1])
            assert f"--help {home}:" in alone and alone.count("\n  --") == 1
            bare = flag.spellings[-1].lstrip("-").replace("-", "_")
            assert bare in told or help_text(run_type, prog, bare) == alone


def test_many_choices_are_a_sentence_of_the_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = help_text(RLRunConfig, PROGS[RLRunConfig], "lora-target")
    assert "--lora-target NAME [NAME ...]" in text and text.count(" gate_proj,") == 1
    assert max(map(len, text.splitlines())) < 100
    assert "--log-level {info,debug}" in help_text(RLRunConfig, PROGS[RLRunConfig], "log-level")


def test_mistakes_name_the_spelling_that_was_typed():
    error = UsageError("--rl-default-top-p 0.9 and --lr 3", "--rl-default-top-p-x")
    for typed, told in (
        (["--rollout_top_p=0.9", "--lr", "3"], "--rollout-top-p 0.9 and --lr 3"),
        (["--rollout-top-p", "1", "--rl-default-top-p", "0.9"], error.mistakes[0]),
        (["--lr", "3"], error.mistakes[0]),
    ):
        assert as_typed(error, RLRunConfig, typed).mistakes == (told, error.mistakes[1])


def test_help_of_what_does_not_exist_names_the_topics():
    with pytest.raises(ValueError, match=r"--help rewrds: .*did you mean rewards\?.*model"):
        parse(RLRunConfig, ["--lr", "1", "--help", "rewrds"], "mindspeed_rl.train_rl")
    for word, meant in (("loss", "policy-loss"), ("--grpo-promts-per-step", "--grpo-prompts-per")):
        with pytest.raises(ValueError, match=rf"--help {word}: .*did you mean {meant}"):
            parse(RLRunConfig, ["--help", word], "mindspeed_rl.train_rl")
    with pytest.raises(ValueError, match="--help --xyz: no topic or flag"):
        help_text(RLRunConfig, "mindspeed_rl.train_rl", "--xyz")


def test_a_mistyped_choice_is_answered_with_the_nearest_one():
    with pytest.raises(UsageError, match=r"--rl-policy-loss: .*'gpso'.*; did you mean 'gspo'\?"):
        parse(RLRunConfig, ["--rl-policy-loss", "gpso"], PROGS[RLRunConfig])
    with pytest.raises(UsageError, match=r"--rl-policy-loss: .*'xyzzy' \(choose from [^;]*\)$"):
        parse(RLRunConfig, ["--rl-policy-loss", "xyzzy"], PROGS[RLRunConfig])


def test_a_reader_of_the_help_may_end_early():
    command = f"{sys.executable} -m mindspeed_rl.train_rl --help all | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("usage:") and done.stderr == ""


def test_worked_example_of_the_help_is_accepted(tmp_path, monkeypatch):
    """Behind a pretraining script of the model that it names; that of RL passes all checks."""
    write_model(tmp_path / "models" / "qwen2.5-7b", **QWEN2_5_7B)
    (tmp_path / "train.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    script = ["--tensor-model-parallel-size", "4", "--sequence-parallel", "--bf16"]
    for run_type, prog in PROGS.items():
        text = build_parser(run_type, prog).epilog
        command = text[text.index("--hf-checkpoint") : text.index("\n\n  Flags of")]
        parsed = parse(run_type, [*script, *command.replace("\\\n", " ").split()], prog)
        assert parsed.ignored == ()
        if run_type is RLRunConfig:
            plan_rl(parsed.config, 16)


def run_entry(prog, argv, environment=None):
    """Run an entry where only Python's own library can be imported: it needs no torch."""
    return subprocess.run(
        [sys.executable, "-S", "-m", prog, *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=300,
    )


@pytest.mark.parametrize("prog", ENTRIES)
def test_help_needs_no_package_but_python(prog):
    done = run_entry(prog, ["--help"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: torchrun ... -m {prog}")


# --- whole entry -------------------------------------------------------------------------------


@pytest.fixture
def inputs(tmp_path):
    write_model(tmp_path, max_position_embeddings=1024)
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1+1", "answer": "2"}\n')
    return ["--hf-checkpoint", str(tmp_path), "--prompt-data", str(data), "--train-iters", "1"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("--prompt-data no.jsonl", ("--prompt-data no.jsonl", "no such file")),
        ("--prompt-dat x", ("unknown flag --prompt-dat", "--prompt-data")),
        ("--rollout-top-p 0.9", ("error: --rollout-top-p 0.9: truncated", "allowed: 1")),
        ("--num-experts 8", ("--num-experts 8", "model has no experts", "remove the flag")),
        ("--rl-world-size 2", ("--rl-world-size 2", "torchrun started 1 rank; ")),
    ],
)
def test_usage_errors_are_one_line_with_exit_code_2(inputs, extra, words):
    """How the entry tells them; the errors themselves are in test_refusals.py."""
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # fmt: skip
    done = run_entry("mindspeed_rl.train_rl", [*inputs, *extra.split()], os.environ | launched)
    text = done.stderr
    assert (done.returncode, done.stdout) == (2, ""), text
    assert text.startswith("mindspeed_rl.train_rl: error: ") and text.count("\n") == 1
    assert [word for word in words if word not in text] == [], text


def test_a_dry_run_under_torchrun_is_told_by_the_first_rank(inputs):
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    done = run_entry("mindspeed_rl.train_rl", [*inputs, "--rl-dry-run"], os.environ | ranks)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_flag_document_is_up_to_date():
    done = subprocess.run(
        [sys.executable, "tools/make_flag_docs.py", "--check"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
