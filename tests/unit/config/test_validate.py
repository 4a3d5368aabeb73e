"""Every wrong configuration is refused before anything heavy starts; messages say how to mend it.

A message names the flag, its value, and what is allowed or what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checked_runs import CLASSIFIER, configured, write_model

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.planning.run_plan import RLPlan, check_pretrain, check_rl

WORLD = 8
STEPS = "--train-iters 3"
Check = Callable[..., RLPlan]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model directory and data files: only what validation looks at."""
    write_model(tmp_path / "model")
    for name in ("rl.jsonl", "eval.jsonl", "sft.jsonl"):
        (tmp_path / name).write_text("{}\n")
    return tmp_path


@pytest.fixture
def check(files: Path) -> Check:
    """Check a valid run of 8 ranks with further flags, of which the last one counts."""

    def checked(flags: str = "", *, steps: str = STEPS, **arguments: bool) -> RLPlan:
        valid = (
            f"--hf-checkpoint {files}/model --prompt-data {files}/rl.jsonl --rollout-tp 4 "
            f"--output-dir {files}/out --max-prompt-length 64 --rollout-max-response-length 64 "
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
            f"--grpo-prompts-per-step 4 --grpo-group-size 4 {steps} "
        )
        return check_rl(configured(RLRunConfig, valid + flags), WORLD, **arguments)

    return checked


def test_a_valid_run_gives_its_plan(check: Check) -> None:
    plan = check("--global-batch-size 8")
    assert (plan.parallel.tp, plan.parallel.pp, plan.parallel.dp) == (2, 2, 2)
    assert plan.engine.num_replicas == 2
    assert plan.max_model_len == 128
    assert plan.batch.samples == 16
    assert plan.batch.updates == 2
    assert not plan.batch.on_policy


def test_rollouts_stay_within_what_the_engine_knows_of_yarn(check: Check, files: Path) -> None:
    """Beyond the stretched context vLLM gives NaN; 128 tokens are asked for."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    write_model(files / "model", rope_scaling=scaling)
    assert check().max_model_len == 128
    write_model(files / "model", rope_scaling=scaling | {"original_max_position_embeddings": 31})
    told = "128 tokens exceed the model's YaRN factor x original_max_position_embeddings 124;"
    with pytest.raises(ValueError, match=told):
        check()


def test_the_batch_arithmetic_in_words(check: Check) -> None:
    """What a run prints at its start."""
    plan = check()
    assert plan.batch.on_policy
    assert plan.batch.lines(plan.parallel.dp, plan.engine.num_replicas) == [
        "samples/step 16 = 4 prompts x 4 samples",
        "optimizer steps/step 1 of 16 samples (8 per data-parallel rank)",
        "rollouts: 2 engines, 8 samples each",
        "on-policy: one optimizer step per rollout batch, ratio 1",
    ]
    twice = check("--grpo-iterations 2 --global-batch-size 4")
    assert twice.batch.updates == 8
    assert twice.batch.lines(2, 2)[-1].startswith("off-policy within a step: 8 optimizer steps")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-model-parallel-size 8 --pipeline-model-parallel-size 1",
         r"--tensor-model-parallel-size or --rollout-tp 8 does not divide .* 12 attention heads"),
        ("--tensor-model-parallel-size 3",
         r"world size 8 is not a multiple of --tensor-model-parallel-size 3 .*start torchrun"),
        ("--pipeline-model-parallel-size 8 --tensor-model-parallel-size 1",
         r"--pipeline-model-parallel-size 8 does not divide the model's 4 layers; allowed:"),
        ("--context-parallel-size 3",
         r"world size 8 is not a multiple of .*--context-parallel-size 3"),
        ("--expert-model-parallel-size 2",
         r"--expert-model-parallel-size 2: the model has no experts; remove it"),
        ("--expert-tensor-parallel-size 9",
         r"--expert-tensor-parallel-size 9: the model has no experts; remove it"),
        ("--num-layer-list 2,2 --noop-layers 1", r"--num-layer-list, .* exclude each other"),
        ("--num-layers-per-virtual-pipeline-stage 3",
         r"--num-layers-per-virtual-pipeline-stage 3 x .* does not divide the 4 layers"),
        ("--rollout-dp 2", r"--rollout-dp 2: a model without experts has nothing to share"),
        ("--rollout-ep 3", r"--rollout-ep 3: experts are spread over all ranks .*allowed: 1 or"),
        ("--rollout-tp 3",
         r"--rollout-tp 3 does not divide the world size 8; allowed: the divisors of 8"),
        ("--rollout-tp 8",
         r"--rollout-tp 8 does not fit the model's 12 attention heads and 4 key/value heads"),
        ("--rollout-kv-cache-gb 1e-5",
         r"--rollout-kv-cache-gb 1e-05: one sequence of 128 tokens needs .* GiB per rank; raise"),
        ("--rollout-kv-cache-gb 0", r"--rollout-kv-cache-gb .*must be positive"),
        ("--grpo-group-size 1", r"--grpo-group-size 1: must be at least 2"),
        ("--rl-default-top-p 0.9", r"--rl-default-top-p 0\.9 .*allowed: top-p 1, top-k -1"),
        ("--rl-default-top-k 40", r"--rl-default-top-k 40: truncated .*allowed: top-p 1"),
        ("--rl-default-temperature 0",
         r"--rl-default-temperature 0\.0: must be positive; .*evaluation is greedy"),
        ("--global-batch-size 5",
         r"--global-batch-size 5 does not divide the 16 samples of a step .*allowed: its div"),
        ("--grpo-prompts-per-step 3 --grpo-group-size 3",
         r"the 9 samples of a step \(--grpo-prompts-per-step 3 x --grpo-group-size 3\) are not "
         r"a multiple of the data-parallel size 2; change one"),
        ("--global-batch-size 1",
         r"--global-batch-size 1 is not a multiple of the data-parallel size 2"),
        ("--seq-length 100",
         r"--max-prompt-length 64 \+ --rollout-max-response-length 64 exceeds --seq-length 100;"),
        ("--rollout-max-response-length 200",
         r"up to 264 tokens exceed the model's max_position_embeddings 256; lower --max-prompt"),
        ("--phase-timeout-s 6",
         r"--reward-timeout-s 10 exceeds --phase-timeout-s 6, .*lower the former or raise"),
        ("--reward-function code:0.5 --reward-code-time-limit-s 11",
         r"--reward-code-time-limit-s 11 exceeds --reward-timeout-s 10"),
        ("--reward-function math remote=2", r"remote needs --reward-url"),
        ("--reward-function environment", r"environment needs --rl-env"),
        ("--reward-function nosuch",
         r"--reward-function nosuch: unknown; known: code, .*, remote; for your own"),
        ("--reward-function mat=0.5 format",
         r"--reward-function mat: unknown; did you mean 'math'\? known"),
        ("--reward-function /no/file.py:x=0.5",
         r"--reward-function /no/file\.py:x: no Python file at '/no/file\.py'; give the path"),
        ("--reward-function math=abc",
         r"--reward-function math=abc: want 'name', .* a finite number as the weight"),
        ("--reward-function math math=2",
         r"--reward-function: two are called 'math': .*rename one"),
        ("--rl-environment /no/file.py:Mine",
         r"--rl-environment /no/file\.py:Mine: no Python file at '/no/file\.py'; give the path"),
        ("--rl-eval-samples 4 --rl-eval-temperature 0", r"--rl-eval-temperature 0: the samples"),
        ("--rl-eval-data a=x a=y", r"--rl-eval-data a=y: give NAME=FILE"),
        ("--save-interval 5", r"--save-interval 5 without --save"),
        ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1",
         r"--lr-warmup-iters .*--lr-warmup-fraction .*exclude each other"),
        ("--recompute-granularity full", r"--recompute-method.*--recompute-num-layers"),
        ("--recompute-method block", r"--recompute-method.*granularity none.*full"),
        ("--recompute-modules mlp moe_act", r"moe_act.*core_attn, mlp, moe"),
        ("--hidden-dropout 0.1",
         r"--hidden-dropout 0\.1: RL allows 0 only; the engine samples without .*remove"),
        ("--attention-dropout 0.5", r"--attention-dropout 0\.5: RL allows 0 only"),
        ("--prompt-data=", r"--prompt-data is required: give a jsonl or parquet"),
        ("--prompt-data /no/rl", r"--prompt-data /no/rl: no such file"),
        ("--eval-prompt-data /no/ev", r"--eval-prompt-data /no/ev: no such file"),
        ("--tokenizer-name-or-path /no",
         r"--tokenizer-name-or-path /no: no such directory; give one with a tokenizer"),
        ("--hf-checkpoint=", r"--hf-checkpoint is required: give a Hugging Face"),
        ("--hf-checkpoint /no", r"--hf-checkpoint /no: .*config\.json is missing;"),
        # each field of the architecture, changed alone
        *(
            (flags, rf"{flags} but the model has {theirs}.*"
                    "remove the flags or point --hf-checkpoint at the right model")
            for flags, theirs in {
                "--num-layers 5": "4",
                "--hidden-size 64": "48",
                "--ffn-hidden-size 128": "64",
                "--num-attention-heads 8": "12",
                "--num-query-groups 2": "4",
                "--kv-channels 8": "4",
                "--vocab-size 300": "307",
                "--padded-vocab-size 384": "512",
                "--rotary-base 1000000.0": "10000.0",
                "--norm-epsilon 1e-05": "1e-06",
                "--max-position-embeddings 257": "256",
            }.items()
        ),
        ("--num-layers 5 --hidden-size 64", r"--num-layers 5 .*; --hidden-size 64 .*; remove the"),
        ("--num-layers 6 --noop-layers 2", r"--num-layers less --noop-layers = 5 .*model has 4"),
        ("--num-layers 6 --noop-layers x", r"--noop-layers x.*94,95"),
    ],
)  # fmt: skip
def test_a_wrong_run_is_refused(check: Check, flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(flags)


def test_steps_must_be_given(check: Check) -> None:
    with pytest.raises(ValueError, match=r"--train-iters is required: give the number of steps"):
        check(steps="")


@pytest.mark.parametrize(
    "flags",
    [
        "--max-position-embeddings 128",  # a script may allow fewer positions than the model
        "--max-position-embeddings 256",
        # both spellings of untruncated sampling
        *(f"--rl-default-top-k {k} --rl-default-top-p {p}" for k in (-1, 0) for p in (0.0, 1.0)),
        "--untie-embeddings-and-output-weights --add-qkv-bias",
    ],
)
def test_what_agrees_is_accepted(check: Check, flags: str) -> None:
    check(flags)


def test_untied_embeddings_must_be_untied(check: Check, files: Path) -> None:
    write_model(files / "model", tie_word_embeddings=True)
    told = r"--untie-embeddings-and-output-weights True but .* False"
    with pytest.raises(ValueError, match=told):
        check("--untie-embeddings-and-output-weights")


def test_an_architecture_that_agrees_is_accepted(check: Check) -> None:
    agreeing = (
        "--num-layers 4 --hidden-size 48 --ffn-hidden-size 64 --num-attention-heads 12 "
        "--num-query-groups 4 --kv-channels 4 --vocab-size 307 --padded-vocab-size 320 "
        "--make-vocab-size-divisible-by 32 --rotary-base 10000 --norm-epsilon 1e-6"
    )
    assert check(agreeing).megatron.vocab_multiple == 64


# --- supervised training -----------------------------------------------------------------------


def pretrain(files: Path, flags: str = "", *, steps: str = STEPS) -> PretrainRunConfig:
    valid = f"--hf-checkpoint {files}/model --tensor-model-parallel-size 2 --global-batch-size 8 "
    return configured(PretrainRunConfig, f"{valid} --sft-data {files}/sft.jsonl {steps} {flags}")


def test_a_valid_supervised_run_which_may_have_dropout(files: Path) -> None:
    assert check_pretrain(pretrain(files), WORLD).parallel.dp == 4
    check_pretrain(pretrain(files, "--hidden-dropout 0.1"), WORLD)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--expert-tensor-parallel-size 9",
         r"--expert-tensor-parallel-size 9: the model has no exp"),
        ("--global-batch-size 6",
         r"--global-batch-size 6: must be a positive multiple .* size 4"),
        ("--sft-data=", r"--sft-data is required"),
        ("--sft-data x", r"--sft-data .*x: no such file"),
        # the stage decides which data is needed
        ("--sft-data= --data-path nowhere",
         r"--data-path without --stage pretrain: .* --sft-data"),
        ("--sft-data= --data-path nowhere --stage pretrain --seq-length 8",
         r"--data-path nowhere: nowhere\.idx is missing"),
        ("--seq-length 4096", r"--seq-length 4096 exceeds .* 256; lower it"),
        ("--keep-mtp", r"--keep-mtp: .*no multi-token-prediction .*remove"),
    ],
)  # fmt: skip
def test_a_wrong_supervised_run_is_refused(files: Path, flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_pretrain(pretrain(files, flags), WORLD)


def test_supervised_steps_and_batch_must_be_given(files: Path) -> None:
    with pytest.raises(ValueError, match="--train-iters is required"):
        check_pretrain(pretrain(files, steps=""), WORLD)
    bare = configured(PretrainRunConfig, f"--hf-checkpoint {files}/model {STEPS} "
                                         f"--sft-data {files}/sft.jsonl")  # fmt: skip
    with pytest.raises(ValueError, match="--global-batch-size 0: must be a positive multiple"):
        check_pretrain(bare, WORLD)


# --- files -------------------------------------------------------------------------------------


def test_weights_and_tokenizer_must_be_there(check: Check, files: Path) -> None:
    """Found before anything is loaded, but not asked of a run that is only predicted."""
    sft, model = pretrain(files), files / "model"
    (model / "tokenizer.json").unlink()
    told = r"--hf-checkpoint .*model: no tokenizer .*--tokenizer-name-or-path"
    with pytest.raises(ValueError, match=told):
        check()
    with pytest.raises(ValueError, match=told):
        check_pretrain(sft, WORLD)
    check(files=False)
    check_pretrain(sft, WORLD, files=False)
    other = files / "other"
    other.mkdir()
    (other / "vocab.json").touch()
    check(f"--tokenizer-name-or-path {other}")
    (other / "vocab.json").rename(other / "config.json")
    with pytest.raises(ValueError, match=r"--tokenizer-name-or-path .*other: no tokenizer is th"):
        check(f"--tokenizer-name-or-path {other}")
    (model / "model.safetensors").rename(model / "tokenizer.json")
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*neither .* safetensors weights"):
        check()
    check(files=False)
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "1.safetensors").touch()
    with pytest.raises(ValueError, match=r"1 of the 2 files .* missing, first 2\.safetensors"):
        check_pretrain(sft, WORLD)


def test_a_reward_of_a_file_needs_the_file_only_to_run(check: Check, files: Path) -> None:
    flags = f"--reward-function {files}/mine.py:score=0.5 format"
    check(flags, files=False)
    (files / "mine.py").write_text("def score(request): return 1.0\n")
    check(flags)


def test_a_reward_model_needs_its_weights(check: Check, files: Path) -> None:
    scorer = write_model(files / "scorer", **CLASSIFIER)
    (scorer / "model.safetensors").unlink()
    flags = f"--reward-model-hf-checkpoint {scorer}"
    with pytest.raises(ValueError, match=r"--reward-model-hf-checkpoint .*scorer: neither .*weigh"):
        check(flags)
    check(flags, files=False)
