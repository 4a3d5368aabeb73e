#!/usr/bin/env bash
# Checks a machine with one GPU or one NPU: packages, arithmetic, trainer, memory, engine, weight sync,
# log-probs, GRPO steps, and the quickstart's task. Prints a table and writes one file to attach to a
# report. Grade: executed on a CPU.
#
# usage: tools/device_check.sh [--platform auto|cpu|cuda|npu] [--size 0.5b|tiny] [--stages STAGE ...]
#                              [--task-steps N] [--limit-s X] [--output DIR]
#
# It installs nothing. PYTHON names the interpreter; otherwise that of .venv, or python3.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ ! -x "$ROOT/.venv/bin/python" ]] || PYTHON="$ROOT/.venv/bin/python"
fi
export PYTHONPATH="$ROOT:$ROOT/tools${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m device_check "$@"
