#!/usr/bin/env bash
# The CPU test suite: style, types, then every test that needs no accelerator.
#
# usage: tests/run_tests.sh                       of the tests marked slow a sixteenth, another one at every commit
#        tests/run_tests.sh --all                 everything, with Ray
#        tests/run_tests.sh PYTEST ARGUMENTS      a part, such as tests/unit
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
export OMP_NUM_THREADS=1

SHARES=16
if [[ "${1:-}" == --all && $# == 1 ]]; then
    SHARES=1
elif (( $# )); then
    PYTHON="$("$ROOT/pretrain_scripts/setup_env.sh" --dev | tail -n 1)"
    exec "$PYTHON" -m pytest "$@"
fi
COMMITS="$(git rev-list --count HEAD 2>/dev/null || echo 0)"
if [[ "$(git rev-parse --is-shallow-repository 2>/dev/null)" == true ]]; then  # no count to go by
    COMMITS="$(( 16#$(git rev-parse HEAD | head -c 7) ))"
fi
SHARE="$(( COMMITS % SHARES ))/$SHARES"
# Ray is 70 MB: every fourth commit installs it and runs one of eight parts of its tests.
RAY_TESTS=(tests/unit/test_rewards_ray.py tests/e2e/test_ray.py)
RAY_SHARE=""; EXTRAS=(--dev)
if (( SHARES == 1 )); then
    RAY_SHARE=0/1
elif (( COMMITS % 4 == 0 )); then
    RAY_SHARE="$(( COMMITS / 4 % 8 ))/8"
fi
[[ -z "$RAY_SHARE" ]] || EXTRAS+=(--ray)
PYTHON="$("$ROOT/pretrain_scripts/setup_env.sh" "${EXTRAS[@]}" | tail -n 1)"
STATUS=0
part() {  # one red part does not hide the others
    "$@" || { STATUS=1; echo "run_tests: failed: ${*:2}" >&2; }
}
echo "== style"
part "$PYTHON" -m ruff check .
part "$PYTHON" -m ruff format --check .
echo "== ascend: emulated NPUs; types beside them"
TYPES="$(mktemp)"
trap 'rm -f "$TYPES"' EXIT
MYPYPATH=tools "$PYTHON" -m mypy -p mindspeed_rl -p bench > "$TYPES" 2>&1 &
part env PYTHON="$PYTHON" tests/ascend/run.sh --halves --slow-share "$SHARE"
wait $! || { STATUS=1; echo "run_tests: failed: mypy" >&2; }
cat "$TYPES"
echo "== tests"
part "$PYTHON" -m pytest -n 2 --dist worksteal --slow-share "$SHARE" "${RAY_TESTS[@]/#/--ignore=}" \
    tests/unit tests/simulated tests/test_*.py
part "$PYTHON" -m pytest --durations 15 --slow-share "$SHARE" "${RAY_TESTS[@]/#/--ignore=}" \
    tests/distributed tests/e2e
if [[ -n "$RAY_SHARE" ]]; then
    echo "== ray, share $RAY_SHARE"
    part "$PYTHON" -m pytest --durations 5 --slow-share "$RAY_SHARE" "${RAY_TESTS[@]}"
fi
exit "$STATUS"
