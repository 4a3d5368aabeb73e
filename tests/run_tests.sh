#!/usr/bin/env bash
# The CPU test suite: style, types, then every test that needs no accelerator.
#
# usage: tests/run_tests.sh                       of the planted faults and of the tests marked slow a
#                                                 sixteenth, another one at every commit
#        tests/run_tests.sh --all                 everything
#        tests/run_tests.sh PYTEST ARGUMENTS      a part, such as tests/unit
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
PYTHON="$("$ROOT/pretrain_scripts/setup_env.sh" --dev | tail -n 1)"
export OMP_NUM_THREADS=1

SHARES=16
if [[ "${1:-}" == --all && $# == 1 ]]; then
    SHARES=1
elif (( $# )); then
    exec "$PYTHON" -m pytest "$@"
fi
COMMITS="$(git rev-list --count HEAD 2>/dev/null || echo 0)"
SHARE="$(( COMMITS % SHARES ))/$SHARES"
STATUS=0
part() {  # one red part does not hide the others
    "$@" || { STATUS=1; echo "run_tests: failed: ${*:2}" >&2; }
}
echo "== style and types"
part "$PYTHON" -m ruff check .
part "$PYTHON" -m ruff format --check .
part env MYPYPATH=tools "$PYTHON" -m mypy -p mindspeed_rl -p bench
echo "== planted faults, share $SHARE"
part "$PYTHON" tests/mutations.py --share "$SHARE"
echo "== ascend: emulated NPUs"
part env PYTHON="$PYTHON" tests/ascend/run.sh --halves --slow-share "$SHARE"
echo "== tests"
part "$PYTHON" -m pytest -n 2 --dist worksteal --slow-share "$SHARE" tests/unit tests/simulated tests/test_*.py
part "$PYTHON" -m pytest --durations 15 --slow-share "$SHARE" tests/distributed tests/e2e
exit "$STATUS"
