#!/usr/bin/env bash
# The CPU test suite in two fixed tiers; a test marked slow is in the second.
#
# usage: tests/run_tests.sh                       first tier: style, types, and all tests but the slow ones
#        tests/run_tests.sh --all                 both tiers
#        tests/run_tests.sh --rest                the second alone: slow tests, Ray, planted faults
#        tests/run_tests.sh PYTEST ARGUMENTS      a part, such as tests/unit
#   TESTS_WITHIN_S=...  of --all: after these seconds no slow test is begun and no fault is planted any
#                       more; what was left out is told
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
export OMP_NUM_THREADS=1

EXTRAS=(--dev)
case "$*" in
    "") ;;
    --all|--rest) EXTRAS+=(--ray) ;;
    *)
        PYTHON="$("$ROOT/pretrain_scripts/setup_env.sh" --dev | tail -n 1)"
        exec "$PYTHON" -m pytest "$@" ;;
esac
PYTHON="$("$ROOT/pretrain_scripts/setup_env.sh" "${EXTRAS[@]}" | tail -n 1)"
STATUS=0
part() {  # one red part does not hide the others
    local begin=$SECONDS
    "$@" || { STATUS=1; echo "run_tests: failed: ${*:2}" >&2; }
    echo "run_tests: $(( SECONDS - begin )) s: ${*:2}"
}
tests() {  # of a tier: its marker expression
    echo "== tests: $1"
    part env PYTHON="$PYTHON" tests/ascend/run.sh --halves -m "$1"
    part "$PYTHON" -m pytest -n 2 --dist worksteal --durations 15 -m "$1" tests/unit tests/simulated tests/test_*.py
    # ranks wait for each other much of the time: two files at once, in the order of conftest.py
    part "$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 15 \
        -m "($1) and not alone" tests/distributed tests/e2e
    part "$PYTHON" -m pytest --durations 15 -m "($1) and alone" tests/distributed tests/e2e
}
with_style() {  # tests, and types beside them
    echo "== style; types beside the tests"
    part "$PYTHON" -m ruff check .
    part "$PYTHON" -m ruff format --check .
    local types; types="$(mktemp)"
    "$PYTHON" -m mypy > "$types" 2>&1 &
    tests "$1"
    wait $! || { STATUS=1; echo "run_tests: failed: mypy" >&2; }
    cat "$types"; rm -f "$types"
}
faults() {
    echo "== planted faults"
    part "$PYTHON" tests/faults/run.py "$@"
}
case "$*" in
    "") with_style "not slow" ;;
    --rest) tests slow; faults ;;
    --all)  # both tiers of a part at once, so that they share fixtures
        SHORT=()
        [[ -z "${TESTS_WITHIN_S:-}" ]] || export TESTS_END_AT="$(( $(date +%s) - SECONDS + TESTS_WITHIN_S ))"
        with_style "slow or not slow"
        unset TESTS_END_AT  # the tests of planted faults do not look at it
        [[ -z "${TESTS_WITHIN_S:-}" ]] || SHORT=(--within "$(( TESTS_WITHIN_S - SECONDS ))")
        # where all is green, the tests that must turn red have just passed
        if (( STATUS )); then faults "${SHORT[@]}"; else faults --proven "${SHORT[@]}"; fi ;;
esac
exit "$STATUS"
