#!/usr/bin/env bash
# DAPO of Qwen3-235B-A22B on 64 Atlas A3 cards: the layout of the GRPO recipe with a higher upper
# clip, dynamic sampling, a soft punishment of long responses, no KL, and batches of 128 prompts.
# Grade: dry run only, not executed on hardware.
#
# usage: pretrain_scripts/dapo_qwen3_235b_a22b_a3.sh [flags of mindspeed_rl.train_rl ...]
#   as pretrain_scripts/grpo_qwen3_235b_a22b_a3.sh, whose variables it takes
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PROMPTS_PER_STEP="${PROMPTS_PER_STEP:-128}"
export DATA_PATH="${DATA_PATH:-$HERE/../data/dapo-math-17k/train.jsonl}"
export OUTPUT_DIR="${OUTPUT_DIR:-$HERE/../outputs/dapo_qwen3_235b_a22b}"
export CKPT_SAVE_DIR="${CKPT_SAVE_DIR:-$OUTPUT_DIR/checkpoints}"

DAPO_ARGS=(
    --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.28 --grpo-kl-beta 0.0
    --grpo-filter-groups-with-same-reward --rl-max-resample "${MAX_RESAMPLE:-4}"
    --rl-overlong-buffer "${OVERLONG_BUFFER:-4096}" --rl-overlong-penalty 1.0
    --rl-loss-aggregation token-mean
)
exec bash "$HERE/grpo_qwen3_235b_a22b_a3.sh" "${DAPO_ARGS[@]}" "$@"
