"""Tokenised rows on disk: made by one process of a node, mapped into the memory of all of them.

An entry is an Arrow stream, which ``datasets.Dataset.from_file`` opens as well, and a JSON file
that describes it. The description is written last, so an entry has one or is not there.
"""

from __future__ import annotations

import glob
import json
import mmap
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rl.core.digest import file_digest
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import atomic_path, write_text_atomic
from mindspeed_rl.core.locks import file_lock

if TYPE_CHECKING:
    import pyarrow

    # Writes the rows to a file, tells how many there are by now, and returns their description.
    Build = Callable[[Path, Callable[[int], None]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """An entry of the cache.

    Attributes:
        table: The rows; their memory is that of the file, which ranks of a node share.
        pages: The mapping of the file; ``madvise(MADV_DONTNEED)`` takes the pages that were read
            from this process, and the node keeps them as long as it has memory for them.
        facts: What the build returned.
    """

    table: pyarrow.Table
    pages: mmap.mmap
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowCache:
    """Where tokenised rows are kept, and how long a process waits for another one's.

    Attributes:
        folder: Folder of the entries; empty: ``mindspeed_rl/prompts/HOST`` in the user's cache
            folder (``XDG_CACHE_HOME``, else ``~/.cache``), which nodes may share.
        limit_s: Longest wait for another process that makes no progress, in seconds.
        progress: Whether to show a bar on a terminal (one rank should).
    """

    folder: str = ""
    limit_s: float = 1800.0
    progress: bool = False

    def open(self, name: str, key: str, build: Build, flag: str) -> StoredRows:
        """Return the entry of a key; the first process builds it while the others wait. Local.

        An entry that was changed or cut after it was made is made again, with a line on stderr.

        Args:
            name: First part of the file names, for people.
            key: Digest (hex) of all that decides the rows.
            build: Makes the rows.
            flag: Flag and value that ask for the rows, for messages.

        Raises:
            UsageError: the folder cannot be used, or another process makes no progress for
                ``limit_s``; and what ``build`` raises.
        """
        folder = self._folder()
        rows, facts = folder / f"{name}-{key[:32]}.arrow", folder / f"{name}-{key[:32]}.json"
        try:
            if _damage(rows, facts):
                folder.mkdir(parents=True, exist_ok=True)
                self._make(rows, facts, build)
            return _mapped(rows, facts)
        except TimeoutError as error:
            raise UsageError(
                f"{flag}: another process has been tokenising the prompts ({error}), with the lock "
                f"{facts}.lock, and for {self.limit_s:g} s (--phase-timeout-s) no row was added; "
                "raise the limit, or end that process if it hangs"
            ) from error
        except OSError as error:
            raise UsageError(
                f"{flag}: the tokenised prompts cannot be kept in {folder}: {error}; name another "
                "folder with --prompt-cache-path, best on a disk of the node"
            ) from error

    def _folder(self) -> Path:
        if self.folder:
            return Path(self.folder)
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return Path(base, "mindspeed_rl", "prompts", socket.gethostname())

    def _make(self, rows: Path, facts: Path, build: Build) -> None:
        from tqdm import tqdm

        shown = None if self.progress else True  # None: on terminals only
        waiting = tqdm(desc="prompts (another process)", unit="row", delay=1, disable=shown)

        def on_wait(note: str) -> None:
            done = note.rpartition(" ")[2]
            waiting.update((int(done) if done.isdigit() else 0) - waiting.n)

        with closing(waiting), file_lock(Path(f"{facts}.lock"), self.limit_s, on_wait) as tell:
            waiting.close()
            damage = _damage(rows, facts)  # another process may have made it in the meantime
            if not damage:
                return
            if facts.exists():
                print(
                    f"prompts: {rows} is damaged ({damage}), so it is made again",
                    file=sys.stderr,
                    flush=True,
                )
            facts.unlink(missing_ok=True)
            for left in rows.parent.glob(f".{glob.escape(rows.stem)}.tmp-*"):
                left.unlink()  # by a process that was killed
            with (
                tqdm(desc="prompts", unit="row", delay=1, disable=shown) as bar,
                atomic_path(rows) as partial,
            ):

                def on_rows(done: int) -> None:
                    bar.update(done - bar.n)
                    tell(f"process {os.getpid()} on {socket.gethostname()}, rows: {done}")

                on_rows(0)
                found = build(partial, on_rows)
                found |= {"bytes": partial.stat().st_size, "xxh3": file_digest(partial)}
            write_text_atomic(facts, json.dumps(found, indent=1) + "\n")


def _damage(rows: Path, facts: Path) -> str:
    """Return what is wrong with an entry; empty: nothing."""
    try:
        described = json.loads(facts.read_text())
        num_bytes, wanted = rows.stat().st_size, described["bytes"]
        if num_bytes != wanted:
            return f"{num_bytes} bytes instead of {wanted}"
        return "" if file_digest(rows) == described["xxh3"] else "its digest differs"
    except FileNotFoundError as error:
        return f"no {error.filename}"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{facts.name}: {error!r}"


def _mapped(rows: Path, facts: Path) -> StoredRows:
    import pyarrow

    # Read as a file before, by `_damage`: mapped pages count for a process only once it uses them.
    with rows.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    table = pyarrow.ipc.open_stream(pyarrow.BufferReader(pyarrow.py_buffer(pages))).read_all()
    return StoredRows(table, pages, json.loads(facts.read_text()))
