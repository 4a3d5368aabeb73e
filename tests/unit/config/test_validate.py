"""Every wrong configuration is refused before anything heavy starts; messages say how to mend it.

A message names the flag, its value, and what is allowed or what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.config import (
    AdvantageConfig,
    AdvantageSettings,
    CheckpointConfig,
    CorrectionConfig,
    IndexedDataConfig,
    KLConfig,
    LoggingConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    PolicyLossConfig,
    PretrainRunConfig,
    PromptConfig,
    RewardConfig,
    RLConfig,
    RLRunConfig,
    RolloutConfig,
    SamplingConfig,
    SftConfig,
    SurrogateSettings,
    TrainConfig,
)
from mindspeed_rl.planning.run_plan import check_pretrain, check_rl

WORLD = 8
HF_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 307,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}

Build = Callable[..., RLRunConfig]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model directory and data files: only what validation looks at."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF_CONFIG))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).touch()
    for name in ("rl.jsonl", "eval.jsonl", "sft.jsonl"):
        (tmp_path / name).write_text("{}\n")
    return tmp_path


def write_model(files: Path, **changes: object) -> None:
    (files / "model" / "config.json").write_text(json.dumps(HF_CONFIG | changes))


@pytest.fixture
def build(files: Path) -> Build:
    """A valid run of 8 ranks with fields replaced, by section."""

    def make(**sections: dict[str, Any]) -> RLRunConfig:
        config = RLRunConfig(
            model=ModelConfig(hf_checkpoint=str(files / "model")),
            parallel=ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
            train=TrainConfig(train_iters=3),
            checkpoint=CheckpointConfig(),
            logging=LoggingConfig(output_dir=str(files / "out")),
            prompts=PromptConfig(prompt_data=str(files / "rl.jsonl"), max_prompt_length=64),
            rl=RLConfig(grpo_prompts_per_step=4, grpo_group_size=4),
            advantages=AdvantageConfig(),
            estimation=AdvantageSettings(),
            policy_loss=PolicyLossConfig(),
            surrogate=SurrogateSettings(),
            kl=KLConfig(),
            correction=CorrectionConfig(),
            sampling=SamplingConfig(),
            rollout=RolloutConfig(
                rl_inference_tensor_model_parallel_size=4, rollout_max_response_length=64
            ),
            memory=MemoryConfig(),
            rewards=RewardConfig(),
        )
        changed = {name: replace(getattr(config, name), **c) for name, c in sections.items()}
        return replace(config, **changed)

    return make


def test_a_valid_run_gives_its_plan(build: Build) -> None:
    plan = check_rl(build(train={"global_batch_size": 8}), WORLD)
    assert (plan.parallel.tp, plan.parallel.pp, plan.parallel.dp) == (2, 2, 2)
    assert plan.engine.num_replicas == 2
    assert plan.max_model_len == 128
    assert plan.batch.samples == 16
    assert plan.batch.updates == 2
    assert not plan.batch.on_policy


def test_rollouts_stay_within_what_the_engine_knows_of_yarn(build: Build, files: Path) -> None:
    """Beyond the stretched context vLLM gives NaN; 128 tokens are asked for."""
    for original in (32, 31):
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
        write_model(files, rope_scaling=scaling)
        if original == 32:
            assert check_rl(build(), WORLD).max_model_len == 128
            continue
        told = "128 tokens exceed the model's YaRN factor x original_max_position_embeddings 124;"
        with pytest.raises(ValueError, match=told):
            check_rl(build(), WORLD)


def test_the_batch_arithmetic_in_words(build: Build) -> None:
    """What a run prints at its start."""
    plan = check_rl(build(), WORLD)
    assert plan.batch.on_policy
    assert plan.batch.lines(plan.parallel.dp, plan.engine.num_replicas) == [
        "samples/step 16 = 4 prompts x 4 samples",
        "optimizer steps/step 1 of 16 samples (8 per data-parallel rank)",
        "rollouts: 2 engines, 8 samples each",
        "on-policy: one optimizer step per rollout batch, ratio 1",
    ]
    twice = check_rl(build(rl={"grpo_iterations": 2}, train={"global_batch_size": 4}), WORLD)
    assert twice.batch.updates == 8
    assert twice.batch.lines(2, 2)[-1].startswith("off-policy within a step: 8 optimizer steps")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"parallel": {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 1}},
            r"--tensor-model-parallel-size or --rollout-tp 8 does not divide .* 12 attention heads",
        ),
        (
            {"parallel": {"tensor_model_parallel_size": 3}},
            r"world size 8 is not a multiple of --tensor-model-parallel-size 3 .*start torchrun",
        ),
        (
            {"parallel": {"pipeline_model_parallel_size": 8, "tensor_model_parallel_size": 1}},
            r"--pipeline-model-parallel-size 8 does not divide the model's 4 layers; allowed:",
        ),
        (
            {"parallel": {"context_parallel_size": 3}},
            r"world size 8 is not a multiple of .*--context-parallel-size 3",
        ),
        (
            {"parallel": {"expert_model_parallel_size": 2}},
            r"--expert-model-parallel-size 2: the model has no experts; remove it",
        ),
        (
            {"parallel": {"num_layer_list": "2,2"}, "model": {"noop_layers": "1"}},
            r"--num-layer-list, .* exclude each other",
        ),
        (
            {"parallel": {"num_layers_per_virtual_pipeline_stage": 3}},
            r"--num-layers-per-virtual-pipeline-stage 3 x .* does not divide the 4 layers",
        ),
        (
            {"rollout": {"rollout_dp": 2}},
            r"--rollout-dp 2: a model without experts has nothing to share",
        ),
        (
            {"rollout": {"rl_inference_expert_model_parallel_size": 3}},
            r"--rollout-ep 3: experts are spread over all ranks .*allowed: 1 or",
        ),
        (
            {"rollout": {"rl_inference_tensor_model_parallel_size": 3}},
            r"--rollout-tp 3 does not divide the world size 8; allowed: the divisors of 8",
        ),
        (
            {"rollout": {"rl_inference_tensor_model_parallel_size": 8}},
            r"--rollout-tp 8 does not fit the model's 12 attention heads and 4 key/value heads",
        ),
        (
            {"rollout": {"rollout_kv_cache_gb": 1e-5}},
            r"--rollout-kv-cache-gb 1e-05: one sequence of 128 tokens needs .* GiB per rank; raise",
        ),
        ({"rollout": {"rollout_kv_cache_gb": 0.0}}, r"--rollout-kv-cache-gb .*must be positive"),
        (
            {"rl": {"grpo_group_size": 1}},
            r"--grpo-group-size 1: must be at least 2",
        ),
        (
            {"rl": {"rl_default_top_p": 0.9}},
            r"--rl-default-top-p 0\.9 .*allowed: top-p 1, top-k -1",
        ),
        ({"rl": {"rl_default_top_k": 40}}, r"--rl-default-top-k 40: truncated .*allowed: top-p 1"),
        (
            {"rl": {"rl_default_temperature": 0.0}},
            r"--rl-default-temperature 0\.0: must be positive; .*evaluation is greedy",
        ),
        (
            {"train": {"global_batch_size": 5}},
            r"--global-batch-size 5 does not divide the 16 samples of a step .*allowed: its div",
        ),
        (
            {"rl": {"grpo_prompts_per_step": 3, "grpo_group_size": 3}},
            r"the 9 samples of a step \(--grpo-prompts-per-step 3 x --grpo-group-size 3\) are not "
            r"a multiple of the data-parallel size 2; change one",
        ),
        (
            {"logging": {"phase_timeout_s": 6.0}},
            r"--reward-timeout-s 10 exceeds --phase-timeout-s 6, .*lower the former or raise",
        ),
        (
            {"rewards": {"reward_function": ("code:0.5",), "reward_code_time_limit_s": 11.0}},
            r"--reward-code-time-limit-s 11 exceeds --reward-timeout-s 10",
        ),
        ({"rewards": {"reward_function": ("math", "remote=2")}}, r"remote needs --reward-url"),
        ({"rewards": {"reward_function": ("environment",)}}, r"environment needs --rl-env"),
        (
            {"prompts": {"rl_eval_samples": 4, "rl_eval_temperature": 0.0}},
            r"--rl-eval-temperature 0: the samples",
        ),
        ({"prompts": {"rl_eval_data": ("a=x", "a=y")}}, r"--rl-eval-data a=y: give NAME=FILE"),
        ({"checkpoint": {"save_interval": 5}}, r"--save-interval 5 without --save"),
        (
            {"train": {"global_batch_size": 1}},
            r"--global-batch-size 1 is not a multiple of the data-parallel size 2",
        ),
        (
            {"train": {"seq_length": 100}},
            r"--max-prompt-length 64 \+ --rollout-max-response-length 64 exceeds --seq-length 100;",
        ),
        (
            {"rollout": {"rollout_max_response_length": 200}},
            r"up to 264 tokens exceed the model's max_position_embeddings 256; lower --max-prompt",
        ),
        (
            {"train": {"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1}},
            r"--lr-warmup-iters .*--lr-warmup-fraction .*exclude each other",
        ),
        ({"train": {"train_iters": 0}}, r"--train-iters is required: give the number of steps"),
        (
            {"parallel": {"expert_tensor_parallel_size": 9}},
            r"--expert-tensor-parallel-size 9: the model has no experts; remove it",
        ),
        (
            {"model": {"hidden_dropout": 0.1}},
            r"--hidden-dropout 0\.1: RL allows 0 only; the engine samples without .*remove",
        ),
        ({"model": {"attention_dropout": 0.5}}, r"--attention-dropout 0\.5: RL allows 0 only"),
        ({"prompts": {"prompt_data": ""}}, r"--prompt-data is required: give a jsonl or parquet"),
        ({"prompts": {"prompt_data": "/no/rl"}}, r"--prompt-data /no/rl: no such file"),
        ({"prompts": {"eval_prompt_data": "/no/ev"}}, r"--eval-prompt-data /no/ev: no such file"),
        (
            {"rewards": {"reward_function": ("nosuch",)}},
            r"--reward-function nosuch: unknown; known: code, .*, remote; for your own",
        ),
        (
            {"rewards": {"reward_function": ("mat=0.5", "format")}},
            r"--reward-function mat: unknown; did you mean 'math'\? known",
        ),
        (
            {"rewards": {"reward_function": ("/no/file.py:x=0.5",)}},
            r"--reward-function /no/file\.py:x: no Python file at '/no/file\.py'; give the path",
        ),
        (
            {"environment": {"rl_environment": "/no/file.py:Mine"}},
            r"--rl-environment /no/file\.py:Mine: no Python file at '/no/file\.py'; give the path",
        ),
        (
            {"rewards": {"reward_function": ("math=abc",)}},
            r"--reward-function math=abc: want 'name', .* a finite number as the weight",
        ),
        (
            {"rewards": {"reward_function": ("math", "math=2")}},
            r"--reward-function: two are called 'math': .*rename one",
        ),
        (
            {"model": {"tokenizer_name_or_path": "/no"}},
            r"--tokenizer-name-or-path /no: no such directory; give one with a tokenizer",
        ),
        ({"model": {"hf_checkpoint": ""}}, r"--hf-checkpoint is required: give a Hugging Face"),
        ({"model": {"hf_checkpoint": "/no"}}, r"--hf-checkpoint /no: .*config\.json is missing;"),
    ],
)
def test_a_wrong_run_is_refused(
    build: Build, sections: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_rl(build(**sections), WORLD)


def test_a_script_may_allow_fewer_positions_than_the_model(build: Build) -> None:
    check_rl(build(model={"max_position_embeddings": 128}), WORLD)
    check_rl(build(model={"max_position_embeddings": 256}), WORLD)


@pytest.mark.parametrize("top_k", [-1, 0])
def test_both_spellings_of_untruncated_sampling(build: Build, top_k: int) -> None:
    for top_p in (0.0, 1.0):
        check_rl(build(rl={"rl_default_top_k": top_k, "rl_default_top_p": top_p}), WORLD)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_layers": 5}, "--num-layers 5 but the model has 4"),
        ({"hidden_size": 64}, "--hidden-size 64 but the model has 48"),
        ({"ffn_hidden_size": 128}, "--ffn-hidden-size 128 but the model has 64"),
        ({"num_attention_heads": 8}, "--num-attention-heads 8 but the model has 12"),
        ({"num_query_groups": 2}, "--num-query-groups 2 but the model has 4"),
        ({"kv_channels": 8}, "--kv-channels 8 but the model has 4"),
        ({"vocab_size": 300}, "--vocab-size 300 but the model has 307"),
        ({"padded_vocab_size": 384}, "--padded-vocab-size 384 but the model has 512"),
        ({"rotary_base": 1e6}, "--rotary-base 1000000.0 but the model has 10000.0"),
        ({"norm_epsilon": 1e-5}, "--norm-epsilon 1e-05 but the model has 1e-06"),
        (
            {"max_position_embeddings": 257},
            "--max-position-embeddings 257 but the model has 256; remove the flags",
        ),
    ],
)
def test_a_contradicting_architecture_flag_is_refused(
    build: Build, flags: dict[str, Any], message: str
) -> None:
    """Each field of the architecture, changed alone."""
    with pytest.raises(ValueError) as caught:
        check_rl(build(model=flags), WORLD)
    assert message in str(caught.value)
    assert "remove the flags or point --hf-checkpoint at the right model" in str(caught.value)


def test_all_contradictions_are_named_at_once(build: Build) -> None:
    with pytest.raises(ValueError, match=r"--num-layers 5 .*; --hidden-size 64 .*; remove the"):
        check_rl(build(model={"num_layers": 5, "hidden_size": 64}), WORLD)


def test_untied_embeddings_must_be_untied(build: Build, files: Path) -> None:
    flags = {"untie_embeddings_and_output_weights": True, "add_qkv_bias": True}
    check_rl(build(model=flags), WORLD)
    write_model(files, tie_word_embeddings=True)
    with pytest.raises(
        ValueError, match=r"--untie-embeddings-and-output-weights True but .* False"
    ):
        check_rl(build(model=flags), WORLD)


def test_flags_that_agree_are_accepted(build: Build) -> None:
    agreeing = {
        "num_layers": 4,
        "hidden_size": 48,
        "ffn_hidden_size": 64,
        "num_attention_heads": 12,
        "num_query_groups": 4,
        "kv_channels": 4,
        "vocab_size": 307,
        "padded_vocab_size": 320,
        "make_vocab_size_divisible_by": 32,
        "rotary_base": 10000.0,
        "norm_epsilon": 1e-6,
    }
    assert check_rl(build(model=agreeing), WORLD).megatron.vocab_multiple == 64


def pretrain(files: Path, batch: int, data: str = "sft.jsonl") -> PretrainRunConfig:
    return PretrainRunConfig(
        model=ModelConfig(hf_checkpoint=str(files / "model")),
        parallel=ParallelConfig(tensor_model_parallel_size=2),
        train=TrainConfig(train_iters=3, global_batch_size=batch),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(),
        sft=SftConfig(sft_data=str(files / data) if data else ""),
        indexed=IndexedDataConfig(),
    )


def test_a_valid_supervised_run(files: Path) -> None:
    assert check_pretrain(pretrain(files, 8), WORLD).parallel.dp == 4


def test_supervised_training_may_have_dropout_but_needs_steps(files: Path) -> None:
    config = pretrain(files, 8)
    check_pretrain(replace(config, model=replace(config.model, hidden_dropout=0.1)), WORLD)
    with pytest.raises(ValueError, match="--train-iters is required"):
        check_pretrain(replace(config, train=replace(config.train, train_iters=0)), WORLD)
    nine = replace(config.parallel, expert_tensor_parallel_size=9)
    with pytest.raises(ValueError, match="--expert-tensor-parallel-size 9: the model has no exp"):
        check_pretrain(replace(config, parallel=nine), WORLD)


@pytest.mark.parametrize("batch", [0, 6])
def test_a_supervised_batch_must_fill_the_ranks(files: Path, batch: int) -> None:
    with pytest.raises(
        ValueError, match=rf"--global-batch-size {batch}: must be a positive multiple .* size 4"
    ):
        check_pretrain(pretrain(files, batch), WORLD)


@pytest.mark.parametrize(
    ("data", "message"), [("", "--sft-data is required"), ("x", r"--sft-data .*x: no such file")]
)
def test_supervised_data_must_exist(files: Path, data: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_pretrain(pretrain(files, 8, data), WORLD)


def test_the_stage_decides_which_data_is_needed(files: Path) -> None:
    both = replace(pretrain(files, 8, ""), indexed=IndexedDataConfig(("nowhere",)))
    with pytest.raises(ValueError, match=r"--data-path without --stage pretrain: .* --sft-data"):
        check_pretrain(both, WORLD)
    stage = replace(both, sft=SftConfig(stage="pretrain"), train=replace(both.train, seq_length=8))
    with pytest.raises(ValueError, match=r"--data-path nowhere: nowhere\.idx is missing"):
        check_pretrain(stage, WORLD)


def test_sequences_must_fit_the_model(files: Path) -> None:
    config = pretrain(files, 8)
    long = replace(config, train=replace(config.train, seq_length=4096))
    with pytest.raises(ValueError, match=r"--seq-length 4096 exceeds .* 256; lower it"):
        check_pretrain(long, WORLD)


def test_only_what_is_there_can_be_kept(files: Path) -> None:
    config = replace(pretrain(files, 8), checkpoint=CheckpointConfig(keep_mtp=True))
    with pytest.raises(ValueError, match=r"--keep-mtp: .*no multi-token-prediction .*remove"):
        check_pretrain(config, WORLD)


def test_weights_and_tokenizer_must_be_there(build: Build, files: Path) -> None:
    """Found before anything is loaded, but not asked of a run that is only predicted."""
    config, sft = build(), pretrain(files, 8)
    (files / "model" / "tokenizer.json").unlink()
    for check in (lambda: check_rl(config, WORLD), lambda: check_pretrain(sft, WORLD)):
        with pytest.raises(
            ValueError, match=r"--hf-checkpoint .*model: no tokenizer .*--tokenizer-name-or-path"
        ):
            check()
    check_rl(config, WORLD, files=False)
    check_pretrain(sft, WORLD, files=False)
    (files / "other").mkdir()
    (files / "other" / "vocab.json").touch()
    other = {"tokenizer_name_or_path": str(files / "other")}
    check_rl(build(model=other), WORLD)
    (files / "other" / "vocab.json").rename(files / "other" / "config.json")
    with pytest.raises(ValueError, match=r"--tokenizer-name-or-path .*other: no tokenizer is th"):
        check_rl(build(model=other), WORLD)
    (files / "model" / "model.safetensors").rename(files / "model" / "tokenizer.json")
    with pytest.raises(ValueError, match=r"--hf-checkpoint .*neither .* safetensors weights"):
        check_rl(config, WORLD)
    check_rl(config, WORLD, files=False)
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (files / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    (files / "model" / "1.safetensors").touch()
    with pytest.raises(ValueError, match=r"1 of the 2 files .* missing, first 2\.safetensors"):
        check_pretrain(sft, WORLD)


def test_a_reward_of_a_file_needs_the_file_only_to_run(build: Build, files: Path) -> None:
    config = build(rewards={"reward_function": (f"{files}/mine.py:score=0.5", "format")})
    check_rl(config, WORLD, files=False)
    (files / "mine.py").write_text("def score(request): return 1.0\n")
    check_rl(config, WORLD)


def test_a_reward_model_needs_its_weights(build: Build, files: Path) -> None:
    (files / "scorer").mkdir()
    scorer = HF_CONFIG | {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    (files / "scorer" / "config.json").write_text(json.dumps(scorer))
    config = build(rewards={"reward_model_hf_checkpoint": str(files / "scorer")})
    with pytest.raises(ValueError, match=r"--reward-model-hf-checkpoint .*scorer: neither .*weigh"):
        check_rl(config, WORLD)
    check_rl(config, WORLD, files=False)
