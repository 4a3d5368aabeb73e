#!/usr/bin/env bash
# Checks that the Python that is about to train has the mindspeed_rl of this repository. If it would
# import another package of that name, which could not report this itself, the script stops with a
# one-line error. Scripts that `mindspeed-rl recipes` wrote have no repository: there the script
# stops if Python has no package of that name.
#
# usage: pretrain_scripts/check_package.sh PYTHON
set -euo pipefail

PACKAGE="$(dirname "${BASH_SOURCE[0]}")/../mindspeed_rl"
FOUND="$("$1" -c '
import importlib.util, pathlib
spec = importlib.util.find_spec("mindspeed_rl")
print(pathlib.Path(spec.origin).resolve().parent if spec and spec.origin else "nothing")')"
if [[ ! -d "$PACKAGE" ]]; then
    [[ "$FOUND" == nothing ]] || exit 0
    echo "check_package: $1 does not have the package mindspeed_rl; activate the environment in which" \
        "it is installed, or name its python: PYTHON=..." >&2
    exit 2
fi
PACKAGE="$(cd "$PACKAGE" && pwd -P)"
if [[ "$FOUND" != "$PACKAGE" ]]; then
    echo "check_package: python imports mindspeed_rl from $FOUND, not from $PACKAGE;" \
        "remove it from PYTHONPATH (${PYTHONPATH:-empty}) or uninstall it from $1" >&2
    exit 2
fi
