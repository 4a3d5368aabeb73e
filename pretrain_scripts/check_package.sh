#!/usr/bin/env bash
# Ends with one line when the python that is about to train would import another package named
# mindspeed_rl than the one of this repository: that one could not tell the user itself.
#
# usage: pretrain_scripts/check_package.sh PYTHON
set -euo pipefail

PACKAGE="$(cd "$(dirname "${BASH_SOURCE[0]}")/../mindspeed_rl" && pwd -P)"
FOUND="$("$1" -c '
import importlib.util, pathlib
spec = importlib.util.find_spec("mindspeed_rl")
print(pathlib.Path(spec.origin).resolve().parent if spec and spec.origin else "nothing")')"
if [[ "$FOUND" != "$PACKAGE" ]]; then
    echo "check_package: python imports mindspeed_rl from $FOUND, not from $PACKAGE;" \
        "remove it from PYTHONPATH (${PYTHONPATH:-empty}) or uninstall it from $1" >&2
    exit 2
fi
