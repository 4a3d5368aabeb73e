#!/usr/bin/env bash
# The CPU test suite: style, types, then every test that needs no accelerator.
#
# usage: tests/run_tests.sh [pytest arguments]     (default: everything)
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
PYTHON="$("$ROOT/pretrain_scripts/setup_env.sh" --dev | tail -n 1)"
export OMP_NUM_THREADS=1

if (( $# )); then
    exec "$PYTHON" -m pytest "$@"
fi
echo "== style and types"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy -p mindspeed_rl
echo "== planted faults"
"$PYTHON" tests/mutations.py
echo "== tests"
exec "$PYTHON" -m pytest --durations 15
