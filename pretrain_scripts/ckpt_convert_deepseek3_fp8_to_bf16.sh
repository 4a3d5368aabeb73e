#!/usr/bin/env bash
# DeepSeek-V3 or R1 as published, in FP8 blocks, to the BF16 weights that a run reads.
# Grade: the commands are those of tools/convert_checkpoint.py, whose tests run on a CPU with small
# models; not executed on the published weights.
#
# usage: [HF_DIR=...] [BF16_DIR=...] pretrain_scripts/ckpt_convert_deepseek3_fp8_to_bf16.sh [flags ...]
#   MTP_NUM_LAYERS=1   keep the layer of multi-token prediction (never trained)
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
HF_DIR="${HF_DIR:-$ROOT/models/DeepSeek-R1}"
BF16_DIR="${BF16_DIR:-$ROOT/models/DeepSeek-R1-bf16}"

CONVERT_ARGS=(
    --load-model-type hf --save-model-type hf --load-dir "$HF_DIR" --save-dir "$BF16_DIR"
    --mtp-num-layers "${MTP_NUM_LAYERS:-0}" --verify
)
exec "$PYTHON" "$ROOT/tools/convert_checkpoint.py" "${CONVERT_ARGS[@]}" "$@"
