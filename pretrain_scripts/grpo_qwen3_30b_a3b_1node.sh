#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B on one Ascend node: 8 NPUs of an Atlas A2, or with MACHINE=a3 the 16 dies of
# an A3. Trainer and engines on the same dies. Grade: dry run only, not executed on hardware.
#
# usage: pretrain_scripts/grpo_qwen3_30b_a3b_1node.sh [flags of mindspeed_rl.train_rl ...]
#   --rl-dry-run    memory and volumes on any machine, without devices or weights
#   --doctor        starts all ranks, looks at the machine and tries every process group
#   GRAPH_MODE=eager   decode operator by operator, for the first run on a machine; else by graphs
set -euo pipefail

MACHINE="${MACHINE:-a2}"
case "$MACHINE" in
    a2) NPUS_PER_NODE="${NPUS_PER_NODE:-8}" ;;
    a3) NPUS_PER_NODE="${NPUS_PER_NODE:-16}" ;;
    *) echo "MACHINE=$MACHINE: allowed are a2, a3" >&2; exit 2 ;;
esac
NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-}"
MASTER_PORT="${MASTER_PORT:-6000}"

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/launch.sh"
source "$HERE/models/qwen3_30b_a3b.sh"

npu_environment

CKPT_LOAD_DIR="${CKPT_LOAD_DIR:-$ROOT/models/Qwen3-30B-A3B}"
OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/outputs/qwen3_30b_a3b}"
CKPT_SAVE_DIR="${CKPT_SAVE_DIR:-$OUTPUT_DIR/checkpoints}"
DATA_PATH="${DATA_PATH:-$ROOT/data/deepscaler/train.jsonl}"
EVAL_DATA_PATH="${EVAL_DATA_PATH:-$ROOT/data/deepscaler/heldout.jsonl}"
LOG_DIR="${LOG_DIR:-$OUTPUT_DIR/logs}"

TP="${TP:-4}"
EP="${EP:-8}"
MBS="${MBS:-1}"
PROMPT_LENGTH="${PROMPT_LENGTH:-1024}"
RESPONSE_LENGTH="${RESPONSE_LENGTH:-8192}"
ROLLOUT_TP="${ROLLOUT_TP:-4}"
ROLLOUT_EP="${ROLLOUT_EP:-4}"

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
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
    --perform-rl-step --grpo-prompts-per-step "${PROMPTS_PER_STEP:-64}"
    --grpo-group-size "${GROUP_SIZE:-16}" --grpo-kl-beta 0.001
)
DATA_ARGS=(--prompt-data "$DATA_PATH" --max-prompt-length "$PROMPT_LENGTH")
REWARD_ARGS=(--reward-function math)
EVAL_ARGS=(--eval-prompt-data "$EVAL_DATA_PATH" --eval-interval 20)
ROLLOUT_ARGS=(
    --rollout-tp "$ROLLOUT_TP" --rollout-ep "$ROLLOUT_EP"
    --rollout-max-response-length "$RESPONSE_LENGTH"
    --rollout-kv-cache-gb "${KV_CACHE_GB:-24}" --rl-default-temperature 1.0
    --rollout-graph-mode "${GRAPH_MODE:-auto}"
    --vllm-max-num-seqs "${MAX_NUM_SEQS:-256}"
)
OUTPUT_ARGS=(
    --output-dir "$OUTPUT_DIR" --save "$CKPT_SAVE_DIR" --save-interval 50 --log-interval 1
    --rl-dry-run-machine "$MACHINE"
)

launch mindspeed_rl.train_rl \
    --hf-checkpoint "$(config_of "$CKPT_LOAD_DIR" qwen3-30b-a3b "$@")" \
    "${MODEL_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${MEMORY_ARGS[@]}" "${TRAIN_ARGS[@]}" \
    "${RL_ARGS[@]}" "${DATA_ARGS[@]}" "${REWARD_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
