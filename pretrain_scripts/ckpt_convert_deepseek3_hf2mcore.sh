#!/usr/bin/env bash
# DeepSeek-V3 or R1 from Hugging Face to MindSpeed-LLM's classic layout. FP8 sources become BF16
# on the way. Runs start from Hugging Face weights without it: it is for MindSpeed-LLM.
# Grade: the commands are those of tools/convert_checkpoint.py, whose tests run on a CPU with small
# models; not executed on the published weights.
#
# usage: [HF_DIR=...] [MCORE_DIR=...] pretrain_scripts/ckpt_convert_deepseek3_hf2mcore.sh [flags ...]
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
HF_DIR="${HF_DIR:-$ROOT/models/DeepSeek-R1}"
MCORE_DIR="${MCORE_DIR:-$ROOT/models/DeepSeek-R1-mcore}"
TP="${TP:-4}"
PP="${PP:-8}"
EP="${EP:-8}"

CONVERT_ARGS=(
    --load-model-type hf --save-model-type mg --load-dir "$HF_DIR" --save-dir "$MCORE_DIR"
    --target-tensor-parallel-size "$TP" --target-pipeline-parallel-size "$PP"
    --target-expert-parallel-size "$EP" --moe-tp-extend-ep --moe-grouped-gemm
    --num-layer-list "${NUM_LAYER_LIST:-7,7,8,8,8,8,8,7}"
    --mtp-num-layers "${MTP_NUM_LAYERS:-0}" --verify
)
exec "$PYTHON" "$ROOT/tools/convert_checkpoint.py" "${CONVERT_ARGS[@]}" "$@"
