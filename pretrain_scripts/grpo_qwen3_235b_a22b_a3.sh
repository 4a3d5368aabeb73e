#!/usr/bin/env bash
# GRPO of Qwen3-235B-A22B on 64 Atlas A3 cards = 128 dies of 64 GB, trainer and engine on the same
# dies, responses of up to 32K tokens. Grade: dry run only, not executed on hardware. Layout, batch
# and lengths follow the CANN recipe's published run; docs/memory.md compares what is predicted.
#
# usage: pretrain_scripts/grpo_qwen3_235b_a22b_a3.sh [flags of mindspeed_rl.train_rl ...]
#   --rl-dry-run    memory and volumes on any machine, without devices or weights
#   --doctor        starts all ranks, looks at the machines and tries every process group
#   GRAPH_MODE=eager   decode operator by operator, for the first run on a machine; else by graphs
#   NNODES=... NODE_RANK=... MASTER_ADDR=...   on every node
set -euo pipefail

NPUS_PER_NODE="${NPUS_PER_NODE:-16}"
NNODES="${NNODES:-8}"
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-}"
MASTER_PORT="${MASTER_PORT:-6000}"

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/launch.sh"
source "$HERE/models/qwen3_235b_a22b.sh"

PHASE_TIMEOUT_S="${PHASE_TIMEOUT_S:-14400}"
npu_environment

CKPT_LOAD_DIR="${CKPT_LOAD_DIR:-$ROOT/models/Qwen3-235B-A22B}"
CKPT_SAVE_DIR="${CKPT_SAVE_DIR:-$ROOT/outputs/qwen3_235b_a22b/checkpoints}"
DATA_PATH="${DATA_PATH:-$ROOT/data/deepscaler/train.jsonl}"
OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/outputs/qwen3_235b_a22b}"
LOG_DIR="${LOG_DIR:-$OUTPUT_DIR/logs}"

TP="${TP:-4}"
PP="${PP:-4}"
CP="${CP:-4}"
EP="${EP:-32}"
MBS="${MBS:-1}"
PROMPT_LENGTH="${PROMPT_LENGTH:-2048}"
RESPONSE_LENGTH="${RESPONSE_LENGTH:-32768}"
ROLLOUT_TP="${ROLLOUT_TP:-4}"
ROLLOUT_DP="${ROLLOUT_DP:-32}"
ROLLOUT_EP="${ROLLOUT_EP:-128}"
MAX_NUM_SEQS="${MAX_NUM_SEQS:-256}"
MAX_NUM_BATCHED_TOKENS="${MAX_NUM_BATCHED_TOKENS:-4096}"

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP" --sequence-parallel
    --pipeline-model-parallel-size "$PP" --num-layer-list "${NUM_LAYER_LIST:-23,24,24,23}"
    --context-parallel-size "$CP" --context-parallel-algo megatron_cp_algo
    --expert-model-parallel-size "$EP" --expert-tensor-parallel-size 1
    --use-distributed-optimizer --distributed-timeout-minutes "$(( PHASE_TIMEOUT_S / 60 ))"
)
MEMORY_ARGS=(
    --swap-optimizer --rl-offload all
    --recompute-granularity selective --recompute-modules moe
)
TRAIN_ARGS=(
    --bf16 --micro-batch-size "$MBS" --train-iters "${TRAIN_ITERS:-200}"
    --lr 1e-6 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.01
)
RL_ARGS=(
    --perform-rl-step --grpo-prompts-per-step "${PROMPTS_PER_STEP:-512}"
    --grpo-group-size "${GROUP_SIZE:-16}" --grpo-kl-beta 0.001
    --prompt-data "$DATA_PATH" --max-prompt-length "$PROMPT_LENGTH" --reward-function math
)
ROLLOUT_ARGS=(
    --rollout-tp "$ROLLOUT_TP" --rollout-dp "$ROLLOUT_DP" --rollout-ep "$ROLLOUT_EP"
    --rollout-max-response-length "$RESPONSE_LENGTH"
    --rollout-kv-cache-gb "${KV_CACHE_GB:-32}" --rl-default-temperature 1.0
    --rollout-graph-mode "${GRAPH_MODE:-auto}"
    --vllm-max-num-seqs "$MAX_NUM_SEQS"
    --vllm-max-num-batched-tokens "$MAX_NUM_BATCHED_TOKENS" --vllm-enable-chunked-prefill true
    --reshard-relay off
)
OUTPUT_ARGS=(
    --output-dir "$OUTPUT_DIR" --save "$CKPT_SAVE_DIR" --save-interval 50 --log-interval 1
    --phase-timeout-s "$PHASE_TIMEOUT_S"
)

launch mindspeed_rl.train_rl \
    --hf-checkpoint "$(config_of "$CKPT_LOAD_DIR" qwen3-235b-a22b "$@")" \
    "${MODEL_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${MEMORY_ARGS[@]}" "${TRAIN_ARGS[@]}" \
    "${RL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
