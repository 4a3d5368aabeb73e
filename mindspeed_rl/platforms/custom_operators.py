"""Finds the compiled operators of vLLM-Ascend for CANN, which looks for them only once.

vLLM-Ascend sets the variable itself when it is imported. By then the trainer has run operators, and
CANN has read where custom ones are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "ASCEND_CUSTOM_OPP_PATH"


def add_custom_operators(environ: MutableMapping[str, str]) -> None:
    """Add vLLM-Ascend's operators to the variable, before those of the user.

    The package is found and not imported.
    """
    spec = importlib.util.find_spec("vllm_ascend")
    for place in (spec and spec.submodule_search_locations) or ():
        for folder in sorted(Path(place, "_cann_ops_custom", "vendors").glob("*")):
            known = [path for path in environ.get(VARIABLE, "").split(":") if path]
            if folder.is_dir() and str(folder) not in known:
                environ[VARIABLE] = ":".join([str(folder), *known])
