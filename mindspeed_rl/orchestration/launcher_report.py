"""What torchrun's own report says of a mistake. Imports no torch: mistakes are told before it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

# torchrun names a file per process, and shows what is in that of the first one to fail.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def tell_mistake(line: str) -> None:
    """Print a mistake of the user, and repeat it at the end of torchrun's report. Local.

    The report comes last, 30 lines long, and would send the reader to a page of PyTorch instead.
    """
    print(line, file=sys.stderr, flush=True)
    if not (name := os.environ.get(_ERROR_FILE)):
        return
    about = {
        "message": line,
        "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))},
    }
    try:
        Path(name).write_text(json.dumps({"message": about}), encoding="utf-8")
    except OSError as error:  # a full disk does not change why the run ends
        print(f"torchrun's report will not repeat it: {error}", file=sys.stderr, flush=True)
