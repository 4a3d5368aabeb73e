"""Runs untrusted programs with limits, and with as many restrictions as the kernel allows.

Which restrictions are possible differs between machines (containers often forbid namespaces), so
they are tried once per process (:func:`probe`), logged, and then required of every program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mindspeed_rl.rewards import sandbox_launcher
from mindspeed_rl.rewards.seccomp import Allowed, filter_program

_LAUNCHER = str(Path(sandbox_launcher.__file__).resolve())
_PROBE_TIME_S = 20.0
_OPEN_FILES = 64
_SHOWN_CHARS = 300
# How much of a program's output is read back.
_OUTPUT_BYTES = 1 << 20
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


OPEN = {
    "network": "every server that this machine reaches",
    "files": "every file of this user, such as keys, data and checkpoints, to read and to change",
    "processes": "every process of this user, to read, to change and to end, the run among them",
}
"""What a program can reach where the kernel closes nothing, by the name for its consent."""


@dataclass(frozen=True, slots=True)
class Restrictions:
    """The restrictions of programs on this machine.

    Attributes:
        counted: Whether their processes are counted although this process is root's, whose are not.
        namespaces: Whether they have no network and do not see other processes.
        files: Whether they read only interpreter and system libraries, and write only their folder.
        calls: Whether system calls are filtered, see `seccomp`; where namespaces are forbidden
            the filter closes network and other processes instead.
    """

    counted: bool
    namespaces: bool
    files: bool
    calls: bool

    @property
    def left_open(self) -> tuple[str, ...]:
        """What programs could reach, by the names of `OPEN`.

        Without the filter of calls they reach sockets with a path, and modes of any file; without
        landlock the memory of other processes, in the file system of the kernel.
        """
        both = self.files and self.calls
        closed = {"network": self.calls, "files": both, "processes": both}
        return tuple(name for name in OPEN if not closed[name])

    def describe(self) -> str:
        """Describe the restrictions in one line for the log."""
        parts = [
            "THE NETWORK IS OPEN" if "network" in self.left_open else "no network",
            "FILES ARE OPEN" if "files" in self.left_open else "files outside its folder closed",
            "PROCESSES ARE OPEN"
            if "processes" in self.left_open
            else "other processes out of reach",
        ]
        if not self.counts_processes:
            parts.append(
                "no processes of its own"
                if self.calls
                else "THE NUMBER OF ITS PROCESSES IS NOT LIMITED"
            )
        return f"programs run with {'; '.join(parts)}"

    @property
    def counts_processes(self) -> bool:
        """Whether the limit of processes holds, which needs a namespace.

        Elsewhere it would also count the processes of the user's other programs.
        """
        return self.namespaces and (self.counted or os.getuid() != 0)

    def filter(self) -> bytes:
        """Return the filter of system calls; empty where there is none."""
        if not self.calls:
            return b""
        return filter_program(Allowed(self.namespaces, self.namespaces, self.counts_processes))


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one program.

    Attributes:
        time_limit_s: Limit of wall clock and of processor time.
        memory_bytes: Address space of each of its processes.
        max_processes: Number of processes and threads.
        file_bytes: Size of the largest file it may write, its output included.
    """

    time_limit_s: float
    memory_bytes: int
    max_processes: int
    file_bytes: int

    def rlimits(self, restrictions: Restrictions) -> dict[str, int]:
        """Return the limits by the names of setrlimit(2)."""
        processes = {"NPROC": self.max_processes} if restrictions.counts_processes else {}
        return processes | {
            "CPU": max(1, int(self.time_limit_s + 0.999)),
            "AS": self.memory_bytes,
            "FSIZE": self.file_bytes,
            "NOFILE": _OPEN_FILES,
            "CORE": 0,
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended.

    Attributes:
        exit_code: Negative or above 128 after a signal; ``None`` when killed at the time limit.
        stdout: First MiB of the output, undecodable bytes replaced.
        stderr: First MiB of the error output, undecodable bytes replaced.
    """

    exit_code: int | None
    stdout: str
    stderr: str


class SandboxError(RuntimeError):
    """The sandbox does not work; the program is not to blame."""


def run_python(
    arguments: list[str],
    stdin: str,
    files: dict[str, str],
    limits: SandboxLimits,
    restrictions: Restrictions,
) -> Ended:
    """Run ``python ARGUMENTS`` in a new folder that contains ``files``. Blocks.

    Raises:
        SandboxError: a restriction could not be set; the program was not started.
    """
    with tempfile.TemporaryDirectory(prefix="mindspeed_rl-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for path, text in files.items():
            (folder / path).write_text(text, encoding="utf-8")
        return _run([sys.executable, "-I", "-B", *arguments], stdin, folder, limits, restrictions)


def probe(limits: SandboxLimits) -> Restrictions:
    """Find the restrictions of this machine: as many as still let a program run. Blocks.

    Raises:
        SandboxError: not even a program without restrictions runs.
    """
    restrictions = Restrictions(False, False, False, False)
    error = _refusal(restrictions, limits)
    if error:
        raise SandboxError(f"no program can be started on this machine: {error}")
    root, known = os.getuid() == 0, bool(filter_program(Allowed(True, True, True)))
    for name, wanted in (
        ("namespaces", True),
        ("counted", root),
        ("files", True),
        ("calls", known),
    ):
        more = replace(restrictions, **{name: True})
        if wanted and not _refusal(more, limits):
            restrictions = more
    return restrictions


def _refusal(restrictions: Restrictions, limits: SandboxLimits) -> str:
    """Return why a program does not run under these restrictions; empty when it does."""
    patient = replace(limits, time_limit_s=_PROBE_TIME_S)
    try:
        ended = run_python(
            ["-c", "open('x', 'w').write('1'); print(6 * 7)"], "", {}, patient, restrictions
        )
    except SandboxError as error:
        return str(error)
    if ended.stdout == "42\n" and ended.exit_code == 0:
        return ""
    return f"exit code {ended.exit_code}: {ended.stderr[-_SHOWN_CHARS:]}"


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Open a pipe: the readable end, which does not block, and the writable end."""
    readable, writable = os.pipe()
    try:
        os.set_blocking(readable, False)
        yield readable, writable
    finally:
        os.close(readable)
        os.close(writable)


def _run(
    command: list[str], stdin: str, folder: Path, limits: SandboxLimits, restrictions: Restrictions
) -> Ended:
    prefixes = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)}
    asked = asdict(restrictions) | {
        "readable": [*sorted(prefixes), *_SYSTEM, *_DEVICES],
        "writable": [str(folder), "/dev/null"],
        "limits": limits.rlimits(restrictions),
        "filter": restrictions.filter().hex(),
    }
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(folder)}
    # Files instead of pipes: their size is limited, and nobody has to read them meanwhile.
    with (
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
        _pipe() as (report, report_fd),
    ):
        asked["report_fd"] = report_fd
        source.write(stdin.encode("utf-8", "replace"))
        source.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", _LAUNCHER, json.dumps(asked), *command],
            stdin=source,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env=environment,
            # A process group of its own, to be killed whole. It stays in the session of the worker,
            # whose end kills the launcher and what it started.
            process_group=0,
            pass_fds=(report_fd,),
        )
        try:
            exit_code: int | None = process.wait(limits.time_limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read(_OUTPUT_BYTES).decode("utf-8", "replace"))
        if _written(report) != sandbox_launcher.STARTED:
            raise SandboxError(f"the program was not started: {texts[1].strip()[-_SHOWN_CHARS:]}")
    return Ended(exit_code, *texts)


def _written(fd: int) -> bytes:
    try:
        return os.read(fd, 16)
    except BlockingIOError:  # nothing yet
        return b""
