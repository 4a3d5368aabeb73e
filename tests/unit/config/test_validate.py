"""What a configuration must have before anything heavy starts, and the plan of one that has it.

The mistakes of single flags are in test_refusals.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.checked_runs import (
    CLASSIFIER,
    check_pretrain_run,
    check_rl_run,
    write_inputs,
    write_model,
)

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.planning.run_plan import RLPlan

Check = Callable[..., RLPlan]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_inputs(tmp_path)


@pytest.fixture
def check(files: Path) -> Check:
    return partial(check_rl_run, files)


def test_a_valid_run_gives_its_plan(check: Check) -> None:
    plan = check("--global-batch-size 8")
    assert (plan.parallel.tp, plan.parallel.pp, plan.parallel.dp) == (2, 2, 2)
    assert plan.engine.num_replicas == 2
    assert plan.max_model_len == 128
    assert plan.batch.samples == 16
    assert plan.batch.updates == 2
    assert not plan.batch.on_policy
    assert check("--grpo-iterations 2 --global-batch-size 4").batch.updates == 8
    lines = check().batch.lines(plan.parallel.dp, plan.engine.num_replicas)
    assert "8 per data-parallel rank" in lines[1] and "2 engines, 8 samples each" in lines[2]
    assert lines[3].startswith("on-policy")


def test_lengths_of_a_pretraining_script_bound_nothing(check: Check) -> None:
    """Longer than the model's 256 positions; prompt and response decide."""
    plan = check("--seq-length 262144 --max-position-embeddings 262144")
    assert plan.max_model_len == 128


def test_rollouts_stay_within_what_the_engine_knows_of_yarn(check: Check, files: Path) -> None:
    """Beyond the stretched context vLLM gives NaN; 128 tokens are asked for."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    write_model(files / "model", rope_scaling=scaling)
    assert check().max_model_len == 128
    write_model(files / "model", rope_scaling=scaling | {"original_max_position_embeddings": 31})
    with pytest.raises(UsageError, match=r"124 positions.* yarn"):
        check()


@pytest.mark.parametrize("check_run", [check_rl_run, check_pretrain_run])
def test_steps_must_be_given(check_run: Check, files: Path) -> None:
    with pytest.raises(UsageError, match="--train-iters is required"):
        check_run(files, steps="")


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
    with pytest.raises(UsageError, match="--untie-embeddings-and-output-weights True"):
        check("--untie-embeddings-and-output-weights")


def test_an_architecture_that_agrees_is_accepted(check: Check) -> None:
    agreeing = (
        "--num-layers 4 --hidden-size 48 --ffn-hidden-size 64 --num-attention-heads 12 "
        "--num-query-groups 4 --kv-channels 4 --vocab-size 307 --padded-vocab-size 320 "
        "--make-vocab-size-divisible-by 32 --rotary-base 10000 --norm-epsilon 1e-6"
    )
    assert check(agreeing).megatron.vocab_multiple == 64


def test_a_valid_supervised_run_which_may_have_dropout(files: Path) -> None:
    assert check_pretrain_run(files).parallel.dp == 4
    check_pretrain_run(files, "--hidden-dropout 0.1")


def test_weights_and_tokenizer_must_be_there(check: Check, files: Path) -> None:
    """Found before anything is loaded, but not asked of a run that is only predicted."""
    model = files / "model"
    (model / "tokenizer.json").unlink()
    told = "--hf-checkpoint .*no tokenizer"
    with pytest.raises(UsageError, match=told):
        check()
    with pytest.raises(UsageError, match=told):
        check_pretrain_run(files)
    check(files=False)
    check_pretrain_run(files, files=False)
    other = files / "other"
    other.mkdir()
    (other / "vocab.json").touch()
    check(f"--tokenizer-name-or-path {other}")
    (other / "vocab.json").rename(other / "config.json")
    with pytest.raises(UsageError, match=r"--tokenizer-name-or-path .*no tokenizer"):
        check(f"--tokenizer-name-or-path {other}")
    (model / "model.safetensors").rename(model / "tokenizer.json")
    with pytest.raises(UsageError, match=r"--hf-checkpoint .*safetensors weights"):
        check()
    check(files=False)
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "1.safetensors").touch()
    with pytest.raises(UsageError, match=r"missing, first 2\.safetensors"):
        check_pretrain_run(files)


def test_a_reward_of_a_file_needs_the_file_only_to_run(check: Check, files: Path) -> None:
    flags = f"--reward-function {files}/mine.py:score=0.5 format"
    check(flags, files=False)
    (files / "mine.py").write_text("def score(request): return 1.0\n")
    check(flags)


def test_a_reward_model_needs_its_weights(check: Check, files: Path) -> None:
    scorer = write_model(files / "scorer", **CLASSIFIER)
    (scorer / "model.safetensors").unlink()
    flags = f"--reward-model-hf-checkpoint {scorer}"
    with pytest.raises(UsageError, match=r"--reward-model-hf-checkpoint .*weights"):
        check(flags)
    check(flags, files=False)
