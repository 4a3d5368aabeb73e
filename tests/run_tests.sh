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
STATUS=0
part() {  # one red part does not hide the others
    "$@" || { STATUS=1; echo "run_tests: failed: ${*:2}" >&2; }
}
echo "== style and types"
part "$PYTHON" -m ruff check .
part "$PYTHON" -m ruff format --check .
part "$PYTHON" -m mypy -p mindspeed_rl
part env MYPYPATH=tools "$PYTHON" -m mypy -p bench
echo "== planted faults"
part "$PYTHON" tests/mutations.py
echo "== tests"
part "$PYTHON" -m pytest -n 2 tests/unit tests/simulated tests/test_*.py
part "$PYTHON" -m pytest --durations 15 tests/distributed tests/e2e
exit "$STATUS"
