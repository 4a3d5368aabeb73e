"""Every mistake on a command line is refused before anything starts, by an error with its flag.

A row is ``flags -> words``, apart by ``&``, which the message must hold; without an arrow they are
the flags as they stand there. ``DIR`` is a folder with inputs and with places that are no good.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.checked_runs import check_pretrain_run, check_rl_run, configured, write_inputs

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig, ScoreRunConfig
from mindspeed_rl.config.npu import check_npu
from mindspeed_rl.config.outputs import check_paths
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.flag_checks.algorithms import check_algorithms
from mindspeed_rl.planning.run_plan import plan_score


def check_on_npu(folder: Path, flags: str) -> None:
    parsed = parse(RLRunConfig, flags.split(), "test")
    check_npu(parsed.config.ascend, parsed.config.parallel, "npu")


def check_places(folder: Path, flags: str) -> None:
    valid = f"--hf-checkpoint {folder}/model --output-dir {folder}/out "
    check_paths(configured(PretrainRunConfig, valid + flags))


def check_score_run(folder: Path, flags: str) -> None:
    valid = f"--hf-checkpoint {folder}/model --platform cpu "
    plan_score(configured(ScoreRunConfig, valid + flags), 1)


CHECKS: dict[str, Callable[[Path, str], object]] = {
    "parse": lambda _, flags: configured(RLRunConfig, flags),
    "parse pretrain": lambda _, flags: configured(PretrainRunConfig, flags),
    "algorithms": lambda _, flags: check_algorithms(configured(RLRunConfig, flags)),
    "rl": check_rl_run,
    "pretrain": check_pretrain_run,
    "npu": check_on_npu,
    "places": check_places,
    "score": check_score_run,
}
REFUSED = {
    "parse": """
        --hidden-dropout 3 -> --hidden-dropout & at least 0 and below 1 & '3'
        --lr -1e-3 -> --lr & at least 0 & '-1e-3'
        --lr nan -> --lr & finite & 'nan'
        --lr 1e6 -> --lr & at most 1 & '1e6'
        --lr 1e38 --critic-lr 2 -> --lr & at most 1 & '1e38'
        --min-lr 2 -> --min-lr & at most 1 & '2'
        --grpo-kl-beta=inf -> --grpo-kl-beta & finite & 'inf'
        --lr fast -> --lr & number & 'fast' & 1e-6
        --lr= -> --lr & number & ''
        --train-iters 1e3 -> --train-iters & whole number & 1000 & '1e3'
        --old-logprob exact -> --old-logprob & 'exact' & on-policy & recompute
        --lr --bf16 -> --lr & takes one value & got none & add it
        --lr 1 2 -> --lr & takes one value & got 2: 1 2
        --reward-function -> --reward-function & one or more values & got none
        --bf16 true -> --bf16 & is a switch & 'true' & remove
        --bf16=true -> --bf16 & is a switch & 'true' & remove
        --use-flash-attn true -> unexpected value 'true' & remove
        --grpo-group-sise 4 -> unknown flag --grpo-group-sise & --grpo-group-size
        --xyzzy-plugh -> unknown flag --xyzzy-plugh & --help
        --fp16 -> --fp16 is refused & bf16 & remove the flag
        --sft-data x -> --sft-data & flag of mindspeed_rl.pretrain & remove
        --rl-inference-pipeline-model-parallel-size 2 -> refused & --rollout-tp
        --fp16 --unknwon --lora-load old -> --fp16 & --unknwon & --lora-load old
        --replay 3 -> --replay 3: give two values & --output-dir
        --replay x out -> --replay x out: give two values
        --replay 0 out -> --replay 0 out: give two values & from 1 on
        --replay 3 out more -> --replay 3 out more: give two values
        --replay 3 out --train-iters 2 -> --replay 3 out & ends with step 2
        --replay 3 out --train-iters 4 -> --replay 3 out & --save & --load
        --replay 1 out --train-iters 4 --rl-selftest loss -> --replay 1 out & not with --rl-selftest
        --train-iters 4 --replay 1 out --rl-benchmark-lengths 4 8 -> not with --rl-bench
        --replay-tolerance -1 -> --replay-tolerance & at least 0
        --vllm- 1 -> --vllm- & the name of an engine option
        --vllm-stream-interval 5 6 -> takes one value & got 2: 5 6 & a list
        --vllm-stream-interval=5 6 -> takes one value & got 2: 5 6 & a list
    """,
    "parse pretrain": """
        --grpo-group-size 8 -> --grpo-group-size is a flag of mindspeed_rl.train_rl
        --vllm-max-num-seqs 8 -> unknown flag --vllm-max-num-seqs
    """,
    "algorithms": """
        --replay-tolerance 0.1 -> --replay-tolerance 0.1 has no effect without --replay
        --replay-compare x.npz -> --replay-compare x.npz has no effect without --replay
        --grpo-group-size 1 -> --grpo-group-size 1 & at least 2 & remax
        --grpo-group-size 0 --rl-advantage-estimator remax -> --grpo-group-size 0
        --critic-lr 1e-4 -> --critic-lr 0.0001 & --rl-advantage-estimator grpo & with gae
        --rl-advantage-estimator gae --critic-warmup-steps 3 --train-iters 3 -> steps 3: the run
        --reward-model-hf-checkpoint m --grpo-filter-groups-with-same-reward -> reward needs rewards
        --reward-model-hf-checkpoint m --rl-advantage-estimator remax -> remax needs rewards
        --rl-routing-replay trainer --old-logprob rollout -> --rl-routing-replay trainer & recompute
        --rl-routing-replay rollout --rollout-rebalance all -> not with --rollout-rebalance all
        --rl-routing-replay rollout --partial-rollout-tokens 8 --old-logprob rollout -> not with --p
        --rl-routing-replay rollout --grpo-filter-groups-with-same-reward --rl-resample-factor 2 \
            --old-logprob rollout -> not with --rl-resample-factor 2
        --rl-routing-replay rollout --rl-environment calculator -> not with --rl-environment
        --partial-rollout-tokens 3 -> --partial-rollout-tokens 3 carries tokens of older
        --rl-resample-factor 2 --old-logprob rollout -> factor 2 has no effect without
        --rl-environment calculator --rl-environment-ray-workers 2 -> without --orchestrator ray
        --rl-eval-in-rollouts --rl-environment calculator -> not with --rl-environment calculator
        --rl-agent calculator -> --rl-agent calculator: write FILE.py:FUNCTION
        --rl-agent a.py:f --rl-environment calculator -> --rl-agent a.py:f & --rl-environment calc
        --rl-agent a.py:f --no-chat-template -> --rl-agent a.py:f: not with --no-chat-template
        --rl-agent a.py:f --system-prompt be -> --rl-agent a.py:f: not with --system-prompt
        --rl-agent a.py:f --rollout-rebalance waiting -> not with --rollout-rebalance waiting
        --rl-agent a.py:f --rollout-drafts history -> not with --rollout-drafts history
        --rl-agent a.py:f --prompt-order by-length -> not with --prompt-order by-length
        --rl-agent a.py:f --partial-rollout-tokens 3 --old-logprob rollout -> 3: not with --rl-agent
        --rl-agent a.py:f --rl-eval-in-rollouts -> --rl-eval-in-rollouts: not with --rl-agent a.py:f
        --rl-agent a.py:f --rl-endpoint-host 0.0.0.0 -> --rl-endpoint-host 0.0.0.0 & every interface
        --rl-agent a.py:f --rl-endpoint-host ::ffff:0.0.0.0 -> ::ffff:0.0.0.0 & every interface
        --rl-agent a.py:f --rl-endpoint-host here -> --rl-endpoint-host here & 127.0.0.1
        --rl-agent-workers 3 -> --rl-agent-workers 3 has no effect without --rl-agent
        --prompt-order by-length --grpo-prompts-per-step 1 -> --prompt-order & --grpo-prompts-per-
        --response-length-cap-factor 1 -> --response-length-cap-factor 1 & above 1
        --response-length-cap-floor 9 -> no effect without --response-length-cap-factor
        --response-length-cap-factor 2 -> --response-length-cap-floor 1024 & length 128
        --response-length-cap-factor 2 --response-length-cap-floor 8 --partial-rollout-tokens 3 \
            --old-logprob rollout -> --response-length-cap-factor 2 & --partial-rollout-tokens 3
        --response-length-cap-factor 2 --response-length-cap-floor 8 --rl-environment calculator \
            -> --response-length-cap-factor 2 & --rl-environment calculator
        --reference-pass single -> --reference-pass single has no effect without --grpo-kl-beta
        --grpo-kl-beta 1 --reference-pass tail --rl-offload all -> not with --rl-offload all & away
        --grpo-kl-beta 1 --reference-pass tail --rollout-rebalance waiting \
            -> not with --rollout-rebalance waiting & requests of others
        --grpo-kl-beta 1 --reference-pass tail --partial-rollout-tokens 8 --old-logprob rollout \
            -> --reference-pass tail: not with --partial-rollout-tokens 8
        --grpo-kl-beta 1 --reference-pass tail --grpo-filter-groups-with-same-reward \
            -> --reference-pass tail: not with --grpo-filter-groups-with-same-reward
        --grpo-kl-beta 1 --reference-pass tail --rl-agent a.py:f -> not with --rl-agent a.py:f
        --old-logprob-pass single -> pass single has no effect with --old-logprob on-policy
        --old-logprob rollout --old-logprob-pass tail -> with --old-logprob rollout & recompute
        --old-logprob recompute --old-logprob-pass tail --rl-offload all \
            -> --old-logprob-pass tail: not with --rl-offload all & away
        --old-logprob recompute --old-logprob-pass tail --partial-rollout-tokens 8 \
            --rl-inference-logprobs-is-correction -> pass tail: not with --partial-rollout-tokens 8
        --old-logprob recompute --old-logprob-pass tail --grpo-kl-beta 1 --reference-pass tail \
            --rollout-rebalance all -> --old-logprob-pass tail: not & --reference-pass tail: not
        --old-logprob recompute --old-logprob-pass single --rl-routing-replay trainer \
            -> --old-logprob-pass single: not with --rl-routing-replay trainer & packed
        --old-logprob recompute --old-logprob-pass tail --rl-routing-replay rollout \
            -> --old-logprob-pass tail: not with --rl-routing-replay rollout
        --rl-clip-ratio-c 0.5 -> --rl-clip-ratio-c 0.5 & above 1
        --rl-clip-ratio-c 1 -> --rl-clip-ratio-c 1 & above 1
        --rl-policy-loss sapo --rl-sapo-tau-pos 0 -> --rl-sapo-tau-pos & more than 0
        --rl-policy-loss clip_cov --rl-clip-cov-lower 5 -> not below --rl-clip-cov-upper 5
        --grpo-kl-beta 1 --rl-kl-in-reward --rl-kl-estimator k3+ -> --rl-kl-estimator k3+ & gradient
        --rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef 0.5 \
            -> --rl-importance-sampling-truncation-coef & at least 1
        --rl-rejection-threshold 1 -> --rl-rejection-threshold 1.0 & --rl-rejection none & k3
        --grpo-filter-groups-with-same-reward --grpo-group-size 1 --rl-advantage-estimator remax \
            -> --grpo-filter-groups-with-same-reward & --grpo-group-size 1
        --rl-overlong-buffer 129 -> --rl-overlong-buffer 129 & --rollout-max-response-length
        --grpo-filter-groups-with-same-reward --rl-resample-factor 1.5 \
            -> --rl-resample-factor 1.5 & --old-logprob rollout
        --grpo-filter-groups-with-same-reward --rl-resample-factor 2 --old-logprob recompute \
            -> --old-logprob recompute & weigh
        --rl-rejection k1 --old-logprob rollout -> --old-logprob rollout & ratio
    """,
    "rl": """
        --partial-rollout-tokens 3 --old-logprob rollout --rl-environment calculator \
            --reward-function environment -> --partial-rollout-tokens 3: not with --rl-environment
        --rollout-rebalance-interval 9 -> no effect with --rollout-rebalance off
        --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 -> 12 attention heads
        --tensor-model-parallel-size 3 -> world size 8 & --tensor-model-parallel-size 3 & torchrun
        --pipeline-model-parallel-size 8 --tensor-model-parallel-size 1 -> 4 layers & allowed
        --context-parallel-size 3 -> world size 8 & --context-parallel-size 3
        --expert-model-parallel-size 2 -> --expert-model-parallel-size 2 & no experts
        --expert-tensor-parallel-size 9 -> --expert-tensor-parallel-size 9 & no experts
        --num-layer-list 2,2 --noop-layers 1 -> --num-layer-list & exclude each other
        --num-layers-per-virtual-pipeline-stage 3 -> does not divide the 4 layers
        --rollout-dp 2
        --rollout-ep 3 -> --rollout-ep 3 & allowed: 1 or
        --rollout-tp 3 -> --rollout-tp 3 & world size 8 & divisors of 8
        --rollout-tp 8 -> --rollout-tp 8 & 12 attention heads and 4 key/value heads
        --rollout-kv-cache-gb 1e-5 -> --rollout-kv-cache-gb & 128 tokens & raise
        --epochs 2 -> --epochs 2 & --train-iters & exclude each other
        --rollout-kv-cache-gb -1 -> --rollout-kv-cache-gb & at least 0
        --grpo-kl-beta 1 --reference-pass single --context-parallel-size 2 \
            --pipeline-model-parallel-size 1 -> --reference-pass single & --context-parallel-size 2
        --grpo-kl-beta 1 --reference-pass tail --tensor-model-parallel-size 4 -> one replica
        --old-logprob recompute --old-logprob-pass tail --tensor-model-parallel-size 4 \
            -> --old-logprob-pass tail & one replica & use --old-logprob-pass packed
        --old-logprob recompute --old-logprob-pass single --context-parallel-size 2 \
            --pipeline-model-parallel-size 1 -> --old-logprob-pass single & --context-parallel-size
        --grpo-kl-beta 1 --reference-pass tail --tensor-model-parallel-size 1 --rollout-tp 4 \
            -> --reference-pass tail & --rollout-tp 4 & several data-parallel replicas
        --grpo-group-size 1
        --rl-default-top-p 0.9 -> --rl-default-top-p 0.9: truncated & allowed: 1; remove
        --rl-default-top-k 40 -> --rl-default-top-k 40: truncated & allowed: -1; remove
        --rl-default-temperature 0 -> --rl-default-temperature & more than 0
        --global-batch-size 5 -> --global-batch-size 5 & 16 samples
        --grpo-prompts-per-step 3 --grpo-group-size 3 -> 9 samples & data-parallel size 2
        --global-batch-size 1 -> --global-batch-size 1 & data-parallel size 2
        --seq-length 100 -> --max-prompt-length 64 & --seq-length 100
        --rollout-max-response-length 200 -> 264 tokens & max_position_embeddings 256
        --phase-timeout-s 6 -> --reward-timeout-s 10 & --phase-timeout-s 6
        --reward-function code:0.5 --reward-code-time-limit-s 11 -> --reward-code-time-limit-s 11
        --reward-function math remote=2 -> --reward-url
        --reward-url http://x -> --reward-url http://x & --reward-function remote
        --reward-length-target 5 -> --reward-length-target 5 & --reward-function length
        --reward-function environment -> --rl-env
        --reward-function nosuch -> --reward-function nosuch & code, & remote
        --reward-function mat=0.5 format -> --reward-function mat: & 'math'
        --reward-function /no/file.py:x=0.5 -> --reward-function /no/file.py:x & no Python file
        --reward-function math=abc -> --reward-function math=abc & finite number
        --reward-function math math=2 -> --reward-function & two & 'math'
        --rl-environment /no/file.py:Mine -> --rl-environment /no/file.py:Mine & no Python file
        --rl-eval-samples 4 --rl-eval-temperature 0 -> --rl-eval-temperature & more than 0
        --rl-eval-data a=x a=y -> --rl-eval-data a=y & NAME=DATASET
        --save-interval 5 -> --save-interval 5 has no effect without --save & add
        --lr-warmup-iters 2 --lr-warmup-fraction 0.1 -> --lr-warmup-iters & exclude each other
        --recompute-granularity full -> --recompute-method & --recompute-num-layers
        --recompute-method block -> --recompute-method & granularity none & full
        --recompute-granularity selective --recompute-modules mlp moe_act -> moe_act & mlp, moe
        --rollout-graph-sizes 4 8 --rollout-graph-count 2 -> --rollout-graph-count & auto
        --rollout-dp-sync engine --rollout-dp-sync-interval 2 -> --rollout-dp-sync-interval
        --rl-kl-horizon 5 --grpo-kl-beta 1 -> --rl-kl-horizon & --rl-kl-target
        --hidden-dropout 0.1 -> --hidden-dropout 0.1: RL allows 0 only
        --attention-dropout 0.5 -> --attention-dropout 0.5: RL allows 0 only
        --prompt-data= -> --prompt-data is required
        --prompt-data /no/rl
        --eval-prompt-data /no/ev
        --tokenizer-name-or-path /no
        --hf-checkpoint= -> --hf-checkpoint is required
        --hf-checkpoint /no -> --hf-checkpoint /no & config.json is missing
        --num-layers 5 -> --num-layers 5 but the model has 4
        --hidden-size 64 -> --hidden-size 64 but the model has 48
        --ffn-hidden-size 128 -> --ffn-hidden-size 128 but the model has 64
        --num-attention-heads 8 -> --num-attention-heads 8 but the model has 12
        --num-query-groups 2 -> --num-query-groups 2 but the model has 4
        --kv-channels 8 -> --kv-channels 8 but the model has 4
        --vocab-size 300 -> --vocab-size 300 but the model has 307
        --padded-vocab-size 384 -> --padded-vocab-size 384 but the model has 512
        --rotary-base 1000000.0 -> --rotary-base 1000000.0 but the model has 10000.0
        --norm-epsilon 1e-05 -> --norm-epsilon 1e-05 but the model has 1e-06
        --num-layers 5 --hidden-size 64 -> --num-layers 5 & - --hidden-size 64 & --hf-checkpoint
        --num-layers 6 --noop-layers 2 -> --num-layers less --noop-layers = 5 & model has 4
        --num-layers 6 --noop-layers x -> --noop-layers x & 94,95
    """,
    "pretrain": """
        --expert-tensor-parallel-size 9 -> --expert-tensor-parallel-size 9 & no experts
        --global-batch-size 6 -> --global-batch-size 6 & positive multiple & 4
        --global-batch-size 0 -> --global-batch-size 0 & positive multiple
        --sft-data= -> --sft-data is required
        --sft-data x -> --sft-data x: no such file
        --sft-data= --data-path nowhere -> --data-path without --stage pretrain & --sft-data
        --sft-data= --data-path nowhere --stage pretrain --seq-length 8 -> --data-path & nowhere.idx
        --stage pretrain --no-shuffle --sft-data= -> --no-shuffle & --stage pretrain & sft
        --seq-length 4096 -> --seq-length 4096 & 256
        --recompute-num-layers 1 -> --recompute-num-layers 1 & granularity none & full
        --keep-mtp -> --keep-mtp & multi-token-prediction
    """,
    "npu": """
        --swap-optimizer -> needs --use-distributed-optimizer
        --hccl-group-buffer tp=200 -> --hccl-group-buffer & 'tp=200'
        --hccl-group-buffer tp:200;tp:64 -> --hccl-group-buffer & 'tp:64'
        --hccl-group-buffer tp:200;expert:64 -> --hccl-group-buffer & 'expert' & tp, cp, dp, dp_cp
    """,
    "places": """
        --export-hf DIR/model -> is --hf-checkpoint & the export would replace
        --export-hf DIR -> contains --hf-checkpoint
        --export-hf DIR/out -> is --output-dir
        --export-hf DIR/save --save DIR/save -> is --save
        --export-hf DIR/save --save DIR/save/deep -> contains --save
        --export-hf DIR/load --load DIR/load -> is --load
        --export-hf DIR/alias -> is --hf-checkpoint
        --save DIR/file/deeper/x -> --save & file is not a directory
        --export-hf DIR/file/deeper/x -> --export-hf & file is not a directory
        --load DIR/nowhere -> --load & nowhere: no such directory
    """,
    "score": """
        --output o.npz -> --tokens
        --tokens none.npz --output o.npz -> --tokens none.npz
        --tokens DIR/in.npz -> --output is required
        --tokens DIR/in.npz --output DIR -> --output & is a directory
        --tokens DIR/in.npz --output DIR/in.npz/o -> --output & in.npz is not a directory
        --tokens DIR/in.npz --output o --temperature 0 -> --temperature & more than 0
        --tokens DIR/in.npz --output o --recompute-num-layers 2 -> --recompute-num-layers & full
        --tokens DIR/in.npz --output o --temperature 0.5 --backend engine -> with --backend engine
        --tokens DIR/in.npz --output o --tensor-model-parallel-size 2 -> world size 1
        --tokens DIR/in.npz --output o --vllm-speculative-config {"method":"ngram"} -> drafts
    """,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, directories in use, a link, and a file where a directory is wanted."""
    found = write_inputs(tmp_path_factory.mktemp("inputs"))
    for name in ("out", "save", "load"):
        (found / name).mkdir()
    (found / "alias").symlink_to(found / "model")
    for name in ("file", "in.npz"):
        (found / name).touch()
    return found


@pytest.mark.parametrize(
    ("check", "row"),
    [(check, row.strip()) for check, rows in REFUSED.items() for row in rows.strip().splitlines()],
)
def test_a_mistake_is_refused_with_its_flag(check: str, row: str, folder: Path) -> None:
    flags, _, words = row.partition(" -> ")
    with pytest.raises(UsageError) as refused:
        CHECKS[check](folder, flags.replace("DIR", str(folder)))
    message = str(refused.value)
    assert all("\n" not in line for line in refused.value.mistakes)
    assert [word for word in (words or flags).split(" & ") if word not in message] == [], message
