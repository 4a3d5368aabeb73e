#!/usr/bin/env bash
# Distillation of Qwen2.5-7B-Instruct into Qwen2.5-0.5B-Instruct on one NVIDIA GPU of 80 GB: the small
# model writes, the large one scores every token. Rewards are measured and not trained on.
# TEACHER_KL=full compares whole distributions. Grade: dry run only, not executed on hardware.
#
# usage: pretrain_scripts/distill_qwen2_5_0_5b_1gpu.sh [flags of mindspeed_rl.train_rl ...]
#   --rl-dry-run    memory and volumes on any machine, without devices or weights
#   --doctor        starts all ranks, looks at the machine and tries every process group
set -euo pipefail

GPUS_PER_NODE="${GPUS_PER_NODE:-1}"
NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-}"
MASTER_PORT="${MASTER_PORT:-6000}"

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/launch.sh"
source "$HERE/models/qwen2_5_0_5b.sh"

export CUDA_DEVICE_MAX_CONNECTIONS=1

CKPT_LOAD_DIR="${CKPT_LOAD_DIR:-$ROOT/models/Qwen2.5-0.5B-Instruct}"
TEACHER_DIR="${TEACHER_DIR:-$ROOT/models/Qwen2.5-7B-Instruct}"
OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/outputs/distill_qwen2_5_0_5b}"
CKPT_SAVE_DIR="${CKPT_SAVE_DIR:-$OUTPUT_DIR/checkpoints}"
DATA_PATH="${DATA_PATH:-$ROOT/data/gsm8k/train.jsonl}"
EVAL_DATA_PATH="${EVAL_DATA_PATH:-$ROOT/data/gsm8k/heldout.jsonl}"
LOG_DIR="${LOG_DIR:-$OUTPUT_DIR/logs}"

MBS="${MBS:-4}"
PROMPT_LENGTH="${PROMPT_LENGTH:-512}"
RESPONSE_LENGTH="${RESPONSE_LENGTH:-1024}"

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1 --use-distributed-optimizer --platform cuda
)
MEMORY_ARGS=(--rl-offload all --recompute-granularity selective --recompute-modules core_attn)
TRAIN_ARGS=(
    --bf16 --micro-batch-size "$MBS" --train-iters "${TRAIN_ITERS:-200}"
    --lr 1e-5 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.01
)
RL_ARGS=(
    --perform-rl-step --grpo-prompts-per-step "${PROMPTS_PER_STEP:-64}"
    --grpo-group-size "${GROUP_SIZE:-4}" --rl-preset distillation
    --teacher-hf-checkpoint "$(config_of "$TEACHER_DIR" qwen2.5-7b "$@")"
    --teacher-kl "${TEACHER_KL:-sampled}"
)
DATA_ARGS=(--prompt-data "$DATA_PATH" --max-prompt-length "$PROMPT_LENGTH")
REWARD_ARGS=(--reward-function math)
EVAL_ARGS=(--eval-prompt-data "$EVAL_DATA_PATH" --eval-interval 20)
ROLLOUT_ARGS=(
    --rollout-tp 1 --rollout-max-response-length "$RESPONSE_LENGTH"
    --rollout-kv-cache-gb "${KV_CACHE_GB:-8}" --rl-default-temperature 1.0
    --vllm-max-num-seqs "${MAX_NUM_SEQS:-256}" --rollout-graph-mode "${GRAPH_MODE:-eager}"
)
OUTPUT_ARGS=(
    --output-dir "$OUTPUT_DIR" --save "$CKPT_SAVE_DIR" --save-interval 50 --log-interval 1
    --rl-dry-run-machine "${MACHINE:-h100}"
)

launch mindspeed_rl.train_rl \
    --hf-checkpoint "$(config_of "$CKPT_LOAD_DIR" qwen2.5-0.5b "$@")" \
    "${MODEL_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${MEMORY_ARGS[@]}" "${TRAIN_ARGS[@]}" \
    "${RL_ARGS[@]}" "${DATA_ARGS[@]}" "${REWARD_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
