#!/usr/bin/env bash
# The CPU test suite: style, types, then every test that needs no accelerator.
#
# usage: tests/run_tests.sh                       a third of the planted faults (another third at every
#                                                 commit), and no tests marked slow
#        tests/run_tests.sh --all                 everything
#        tests/run_tests.sh PYTEST ARGUMENTS      a part, such as tests/unit
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
PYTHON="$("$ROOT/pretrain_scripts/setup_env.sh" --dev | tail -n 1)"
export OMP_NUM_THREADS=1

FAULTS=3
QUICK=(-m "not slow")
if [[ "${1:-}" == --all && $# == 1 ]]; then
    FAULTS=1
    QUICK=()
elif (( $# )); then
    exec "$PYTHON" -m pytest "$@"
fi
COMMITS="$(git rev-list --count HEAD 2>/dev/null || echo 0)"
STATUS=0
part() {  # one red part does not hide the others
    "$@" || { STATUS=1; echo "run_tests: failed: ${*:2}" >&2; }
}
echo "== style and types"
part "$PYTHON" -m ruff check .
part "$PYTHON" -m ruff format --check .
part "$PYTHON" -m mypy -p mindspeed_rl
part env MYPYPATH=tools "$PYTHON" -m mypy -p bench
echo "== planted faults, share $(( COMMITS % FAULTS )) of $FAULTS"
part "$PYTHON" tests/mutations.py --share "$(( COMMITS % FAULTS ))/$FAULTS"
echo "== tests"
part "$PYTHON" -m pytest -n 2 tests/unit tests/simulated tests/test_*.py
part "$PYTHON" -m pytest --durations 15 "${QUICK[@]}" tests/distributed tests/e2e
exit "$STATUS"
