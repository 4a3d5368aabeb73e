#!/usr/bin/env bash
# PPO of Qwen2.5-32B, critic included, on 16 Atlas A3 cards = 32 dies of 64 GB in two nodes. Trainer,
# critic and engines on the same dies. Grade: dry run only, not executed on hardware.
#
# usage: pretrain_scripts/ppo_qwen2_5_32b_a3.sh [flags of mindspeed_rl.train_rl ...]
#   --rl-dry-run    memory and volumes on any machine, without devices or weights
#   --doctor        starts all ranks, looks at the machines and tries every process group
#   GRAPH_MODE=eager   decode operator by operator, for the first run on a machine; else by graphs
#   NNODES=... NODE_RANK=... MASTER_ADDR=...   on every node
set -euo pipefail

NPUS_PER_NODE="${NPUS_PER_NODE:-16}"
NNODES="${NNODES:-2}"
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-}"
MASTER_PORT="${MASTER_PORT:-6000}"

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/launch.sh"
source "$HERE/models/qwen2_5_32b.sh"

npu_environment

CKPT_LOAD_DIR="${CKPT_LOAD_DIR:-$ROOT/models/Qwen2.5-32B}"
OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/outputs/ppo_qwen2_5_32b}"
CKPT_SAVE_DIR="${CKPT_SAVE_DIR:-$OUTPUT_DIR/checkpoints}"
DATA_PATH="${DATA_PATH:-$ROOT/data/dapo-math-17k/train.jsonl}"
EVAL_DATA_PATH="${EVAL_DATA_PATH:-$ROOT/data/dapo-math-17k/heldout.jsonl}"
LOG_DIR="${LOG_DIR:-$OUTPUT_DIR/logs}"

TP="${TP:-8}"
PP="${PP:-2}"
MBS="${MBS:-1}"
PROMPT_LENGTH="${PROMPT_LENGTH:-1024}"
RESPONSE_LENGTH="${RESPONSE_LENGTH:-2048}"
ROLLOUT_TP="${ROLLOUT_TP:-4}"

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --pipeline-model-parallel-size "$PP"
    --use-distributed-optimizer
)
MEMORY_ARGS=(
    --swap-optimizer --rl-offload all
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
TRAIN_ARGS=(
    --bf16 --micro-batch-size "$MBS" --train-iters "${TRAIN_ITERS:-200}"
    --lr 1e-6 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.01
)
RL_ARGS=(
    --perform-rl-step --grpo-prompts-per-step "${PROMPTS_PER_STEP:-256}"
    --grpo-group-size "${GROUP_SIZE:-1}" --global-batch-size "${GBS:-64}"
    --rl-advantage-estimator gae --gae-lambda 0.95 --rl-gamma 1.0
    --rl-kl-in-reward --grpo-kl-beta 0.001 --rl-kl-estimator k1
    --critic-lr 1e-5 --critic-warmup-steps "${CRITIC_WARMUP_STEPS:-10}"
)
DATA_ARGS=(--prompt-data "$DATA_PATH" --max-prompt-length "$PROMPT_LENGTH")
REWARD_ARGS=(--reward-function math)
EVAL_ARGS=(--eval-prompt-data "$EVAL_DATA_PATH" --eval-interval 20)
ROLLOUT_ARGS=(
    --rollout-tp "$ROLLOUT_TP" --rollout-max-response-length "$RESPONSE_LENGTH"
    --rollout-kv-cache-gb "${KV_CACHE_GB:-24}" --rl-default-temperature 1.0
    --rollout-graph-mode "${GRAPH_MODE:-auto}"
    --vllm-max-num-seqs "${MAX_NUM_SEQS:-256}"
)
OUTPUT_ARGS=(
    --output-dir "$OUTPUT_DIR" --save "$CKPT_SAVE_DIR" --save-interval 50 --log-interval 1
)

launch mindspeed_rl.train_rl \
    --hf-checkpoint "$(config_of "$CKPT_LOAD_DIR" qwen2.5-32b "$@")" \
    "${MODEL_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${MEMORY_ARGS[@]}" "${TRAIN_ARGS[@]}" \
    "${RL_ARGS[@]}" "${DATA_ARGS[@]}" "${REWARD_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
