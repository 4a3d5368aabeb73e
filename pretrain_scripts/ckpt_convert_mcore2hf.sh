#!/usr/bin/env bash
# A checkpoint of MindSpeed-LLM or of a run (classic layout or torch_dist) to Hugging Face.
# Grade: the commands are those of tools/convert_checkpoint.py, whose tests run on a CPU with small
# models; not executed on the published weights.
#
# usage: MCORE_DIR=... HF_CFG_DIR=... HF_DIR=... pretrain_scripts/ckpt_convert_mcore2hf.sh [flags ...]
#   HF_CFG_DIR   folder with config.json and tokenizer of the model
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
MCORE_DIR="${MCORE_DIR:?name the folder of the checkpoint}"
HF_CFG_DIR="${HF_CFG_DIR:?name a folder with config.json and tokenizer}"
HF_DIR="${HF_DIR:?name the folder to write}"

CONVERT_ARGS=(
    --load-model-type mg --save-model-type hf --load-dir "$MCORE_DIR" --save-dir "$HF_DIR"
    --hf-cfg-dir "$HF_CFG_DIR" --verify
)
exec "$PYTHON" "$ROOT/tools/convert_checkpoint.py" "${CONVERT_ARGS[@]}" "$@"
