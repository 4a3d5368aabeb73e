"""Finds out at the start of a run whether all nodes see the same folder of checkpoints.

The ranks of a checkpoint write and read parts of it. On storage that each node has for itself every
save would leave parts that no node can put together, and a load would take them for damaged.
"""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.parallel.small_collectives import gather_objects

_TOKEN = ".storage-check-"
# Clients of network file systems keep for a while that a name does not exist.
_PATIENCE_S, _PAUSE_S = 10.0, 0.1
_FIX = (
    "name a folder on a file system that is mounted on all nodes (NFS, Lustre, GPFS), or copy the "
    "folder to one"
)


def check_written(directory: str, *, writes: bool, patience_s: float = _PATIENCE_S) -> None:
    """Refuse a ``--save`` folder that is not the same one on all nodes. Collective: the world.

    One rank of each node writes a file into it, for which all ranks look; it is removed again.

    Args:
        directory: The folder, which is made if it is not there.
        writes: Whether this rank writes the file of its node.
        patience_s: How long to look for the files of other nodes, in seconds.

    Raises:
        UsageError: On all ranks: a rank does not see the file of another node, or cannot write.
    """
    own = Path(directory) / f"{_TOKEN}{secrets.token_hex(8)}"
    problem = _problem(lambda: _write(own)) if writes else ""
    files = gather_objects((own.name if writes else "", problem, platform.node()))
    names = [name for name, *_ in files if name]
    unseen = _unseen(Path(directory), names, patience_s)
    seen_by = gather_objects(unseen)
    if writes:
        own.unlink(missing_ok=True)
    for rank, (_, problem, node) in enumerate(files):
        if problem:
            raise UsageError(f"--save {directory}: rank {rank} on {node} cannot write: {problem}")
    for rank, missing in enumerate(seen_by):
        if missing:
            writer, node = next((r, f[2]) for r, f in enumerate(files) if f[0] == missing[0])
            raise UsageError(
                f"--save {directory} is not on storage that all nodes share: rank {rank} on "
                f"{files[rank][2]} does not see what rank {writer} on {node} writes there, and "
                f"no node could load a checkpoint; {_FIX}"
            )


def check_listed(directory: str) -> None:
    """Refuse a ``--load`` folder that is not the same one on all nodes. Collective: the world.

    The names of checkpoints in it are compared; nothing is written.

    Raises:
        UsageError: On all ranks: they differ.
    """
    mine = sorted(path.name for path in Path(directory).glob("iter_*"))
    lists = gather_objects((mine, platform.node()))
    expected, first = lists[0]
    for rank, (names, node) in enumerate(lists):
        if names != expected:
            raise UsageError(
                f"--load {directory} is not on storage that all nodes share: rank 0 on {first} "
                f"sees {', '.join(expected[-3:]) or 'no checkpoint'}, rank {rank} on {node} "
                f"{', '.join(names[-3:]) or 'no checkpoint'}; {_FIX}"
            )


def _problem(act: Callable[[], None]) -> str:
    try:
        act()
    except OSError as error:
        return str(error)
    return ""


def _write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _unseen(folder: Path, names: list[str], patience_s: float) -> list[str]:
    """Return the names that do not appear in a folder. Local."""
    end = time.monotonic() + patience_s
    while True:
        seen = {path.name for path in folder.glob(f"{_TOKEN}*")}
        unseen = [name for name in names if name not in seen]
        if not unseen or time.monotonic() > end:
            return unseen
        time.sleep(_PAUSE_S)
