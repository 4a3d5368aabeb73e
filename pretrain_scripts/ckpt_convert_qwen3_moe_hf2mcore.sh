#!/usr/bin/env bash
# Qwen3-235B-A22B or 30B-A3B from Hugging Face to MindSpeed-LLM's classic layout. Runs start from
# Hugging Face weights without it: it is for MindSpeed-LLM.
# Grade: the commands are those of tools/convert_checkpoint.py, whose tests run on a CPU with small
# models; not executed on the published weights.
#
# usage: [HF_DIR=...] [MCORE_DIR=...] pretrain_scripts/ckpt_convert_qwen3_moe_hf2mcore.sh [flags ...]
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
HF_DIR="${HF_DIR:-$ROOT/models/Qwen3-235B-A22B}"
MCORE_DIR="${MCORE_DIR:-$HF_DIR-mcore}"
TP="${TP:-4}"
PP="${PP:-4}"
EP="${EP:-32}"

CONVERT_ARGS=(
    --load-model-type hf --save-model-type mg --load-dir "$HF_DIR" --save-dir "$MCORE_DIR"
    --target-tensor-parallel-size "$TP" --target-pipeline-parallel-size "$PP"
    --target-expert-parallel-size "$EP" --expert-tensor-parallel-size 1 --moe-grouped-gemm
)
if [[ -n "${NUM_LAYER_LIST:-}" ]]; then CONVERT_ARGS+=(--num-layer-list "$NUM_LAYER_LIST"); fi
exec "$PYTHON" "$ROOT/tools/convert_checkpoint.py" "${CONVERT_ARGS[@]}" --verify "$@"
