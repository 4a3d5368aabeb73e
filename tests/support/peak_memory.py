"""The memory that a task takes, measured in a process of its own."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

from mindspeed_rl.platforms.host_memory import peak_bytes, reset_peak_bytes


def peak_of(task: Callable[[], object], first: Callable[[], object]) -> int:
    """Bytes that a forked process takes for a task beyond what it has after ``first``.

    Pages of libraries are the child's own only when it has touched them.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            first()
            reset_peak_bytes()
            before = peak_bytes()
            task()
            os.write(writer, str(peak_bytes() - before).encode())
            status = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"status {status}: {text}"
    return int(text)
