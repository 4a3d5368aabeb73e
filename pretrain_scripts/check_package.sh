#!/usr/bin/env bash
# Ends with one line when the python that is about to train would import another package named
# mindspeed_rl than the one of this repository: that one could not tell the user itself. Scripts that
# `mindspeed-rl recipes` wrote have no repository: there it ends when the python has no such package.
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
