#!/usr/bin/env bash
# Runs the tests of the NPU path on the emulator, building it where needed.
#
# usage: tests/ascend/run.sh [PYTEST ARGUMENTS]
#        tests/ascend/run.sh --halves [PYTEST OPTIONS]
#                                        all of it in two processes: ranks in the one, the rest in the
#                                        other, so that ranks are forks of one process
#   PYTHON=...          interpreter with torch 2.13.0 and the test requirements (default: .venv's)
#   MINDSPEED_PATH=...  a checkout of MindSpeed's branch core_r0.16.0: its adaptor is run as well
#   MINDSPEED_SOURCE=URL|FOLDER  clone that checkout from there into the cache
#   MINDSPEED_RL_ASCEND_CACHE=...  where the wheels are unpacked (default: the user's cache)
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
cd "$ROOT"
SETTINGS="$("$PYTHON" tests/ascend/emulator/build.py)"
eval "$SETTINGS"
export PYTHONPATH="$ROOT:$ROOT/tests:$PYTHONPATH" OMP_NUM_THREADS=1
if [[ "${1:-}" == --halves ]]; then
    shift
    RANKS=(
        tests/ascend/test_{census,checkpoint,engine,families,left_out,movement,profiler}.py
        tests/ascend/test_{training,whole_job}.py
    )
    OUTPUT="$(mktemp)"
    trap 'rm -f "$OUTPUT"' EXIT
    "$PYTHON" -m pytest --disable-warnings --durations 5 "$@" "${RANKS[@]}" > "$OUTPUT" 2>&1 &
    STATUS=0
    "$PYTHON" -m pytest --disable-warnings --durations 5 "$@" tests/ascend "${RANKS[@]/#/--ignore=}" ||
        STATUS=$?
    wait $! || STATUS=$?
    cat "$OUTPUT"
    exit "$STATUS"
fi
[[ " $*" == *" tests/"* ]] || set -- tests/ascend "$@"
exec "$PYTHON" -m pytest --disable-warnings "$@"
