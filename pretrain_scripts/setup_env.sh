#!/usr/bin/env bash
# Creates or reuses .venv in the repository root with the pinned dependencies of
# mindspeed_rl/versions.cfg. Prints the path of its python on the last line.
# Beside scripts that `mindspeed-rl recipes` wrote there is nothing to install: it prints the path of
# the python that has the package.
#
# usage: pretrain_scripts/setup_env.sh [--dev] [--ray]
#   --dev            also what the tests need
#   --ray            also Ray, for --orchestrator ray and --reward-pool ray
#   PYTHON=...       interpreter to build .venv with (default: python3)
#   TORCH_INDEX_URL  package index to take torch from, e.g. PyTorch's public CPU index
#                    https://download.pytorch.org/whl/cpu
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
VENV="$ROOT/.venv"
MATRIX="$ROOT/mindspeed_rl/versions.cfg"
SECTIONS=(core cpu)

fail() { echo "setup_env: $*" >&2; exit 2; }

for argument in "$@"; do
    case "$argument" in
        --dev|--ray) SECTIONS+=("${argument#--}") ;;
        *) fail "$argument: allowed are --dev and --ray" ;;
    esac
done

if [[ ! -f "$ROOT/setup.py" ]]; then
    [[ "$PYTHON" != python3 || ! -x "$VENV/bin/python" ]] || PYTHON="$VENV/bin/python"
    "$ROOT/pretrain_scripts/check_package.sh" "$PYTHON"
    command -v "$PYTHON"
    exit 0
fi

"$PYTHON" - <<'PY' || fail "$PYTHON is $("$PYTHON" --version 2>&1); Python 3.11 or later is needed (set PYTHON=...)"
import sys
sys.exit(sys.version_info < (3, 11))
PY
command -v gcc >/dev/null || fail "gcc is missing; install a C compiler"

# Several nodes may share this directory, and several jobs a machine.
if command -v flock >/dev/null; then
    exec 9> "$ROOT/.venv.lock"
    flock 9
fi

fingerprint() { cat "$MATRIX" "$ROOT/setup.py" | sha256sum | cut -c1-16; }
STAMP="$VENV/.mindspeed_rl"
WANTED="$(fingerprint)"
ready() { # section -> was it installed from this matrix?
    [[ -f "$STAMP" ]] && grep -qx "$WANTED $1" "$STAMP"
}

MISSING=()
for section in "${SECTIONS[@]}"; do ready "$section" || MISSING+=("$section"); done
if (( ${#MISSING[@]} == 0 )); then
    echo "setup_env: .venv matches the matrix" >&2
    echo "$VENV/bin/python"
    exit 0
fi

# Without python3-venv a first attempt leaves an environment that has no pip.
"$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv "$VENV" ||
    fail "$PYTHON cannot make a virtual environment; install its venv package (Debian: python3-venv)"
PIP=("$VENV/bin/python" -m pip --disable-pip-version-check -qq)
told() { # WHAT COMMAND...: runs the command, with a line every 30 s
    local what="$1" began="$SECONDS" code=0 teller
    shift
    # The sleep outlives its shell for a while, so it holds neither the lock nor an output.
    while sleep "${SETUP_LINE_S:-30}" > /dev/null 2>&1 && kill -0 $$ 2> /dev/null; do
        echo "setup_env: still $what, $(( SECONDS - began )) s so far" >&2
    done > /dev/null 9>&- &
    teller=$!
    "$@" || code=$?
    kill "$teller" 2> /dev/null || true
    wait "$teller" 2> /dev/null || true
    return "$code"
}
requirements() { # sections -> requirement lines
    (cd "$ROOT" && "$VENV/bin/python" -c '
import sys
from mindspeed_rl.core import versions
print("\n".join(r for s in sys.argv[1:] for r in versions.requirements(s)))' "$@")
}

INDEX=(); [[ -n "${TORCH_INDEX_URL:-}" ]] && INDEX=(--index-url "$TORCH_INDEX_URL")
TORCH="$(requirements cpu | grep '^torch==')"
HINT="set TORCH_INDEX_URL to an index with CPU builds of torch, e.g. https://download.pytorch.org/whl/cpu"
cuda_build() { "$VENV/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; }

echo "setup_env: installing $TORCH (CPU build)" >&2
# Ask which file pip would take before it downloads gigabytes of CUDA packages.
if [[ "$(uname -s)-$(uname -m)" == Linux-x86_64 ]]; then
    CHOSEN="$("${PIP[@]}" install --dry-run --no-deps --ignore-installed --report - "${INDEX[@]}" "$TORCH" |
        "$VENV/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["download_info"]["url"])')" ||
        fail "pip finds no $TORCH; $HINT"
    [[ "$CHOSEN" == *cpu* ]] || fail "pip would take a CUDA build of torch ($(basename "$CHOSEN")); $HINT"
fi
told "installing $TORCH" "${PIP[@]}" install "${INDEX[@]}" "$TORCH"
cuda_build && fail "the torch in .venv is a CUDA build; remove .venv and $HINT"

echo "setup_env: installing the pinned dependencies (1.5 minutes with a fast network)" >&2
requirements "${SECTIONS[@]}" > "$VENV/requirements.txt"
requirements cpu.no-deps > "$VENV/requirements-no-deps.txt"
told "installing the pinned dependencies" "${PIP[@]}" install -r "$VENV/requirements.txt"
# Their own dependencies would pull CUDA builds and media libraries that nothing here uses.
told "installing vLLM" "${PIP[@]}" install --no-deps -r "$VENV/requirements-no-deps.txt"
"${PIP[@]}" install --no-deps --no-build-isolation -e "$ROOT"
cuda_build && fail "a dependency replaced torch by a CUDA build; remove .venv and $HINT"

printf "$WANTED %s\n" "${SECTIONS[@]}" > "$STAMP"
echo "$VENV/bin/python"
