"""Runs programs that nobody has read: with limits, and with as few rights as the kernel allows.

What is allowed differs between machines (containers often forbid namespaces), so it is tried once
per process (:func:`probe`), said, and from then on required of every program.
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
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_rl.rewards import sandbox_launcher

_LAUNCHER = str(Path(sandbox_launcher.__file__).resolve())
_PROBE_TIME_S = 20.0
_OPEN_FILES = 64
_SHOWN_CHARS = 300
# Of a program's output, what is read back.
_OUTPUT_BYTES = 1 << 20
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True, slots=True)
class Rights:
    """What a program cannot do here.

    Attributes:
        counted: its processes are counted although this process is root's, whose are not.
        namespaces: it has no network and does not see other processes.
        files: it reads the interpreter and the system's libraries, and writes its folder only.
        deny_tcp: it cannot use TCP; the substitute where namespaces are forbidden.
    """

    counted: bool
    namespaces: bool
    files: bool
    deny_tcp: bool

    @property
    def network(self) -> str:
        """How far the network is cut off, in words."""
        if self.namespaces:
            return "no network"
        return "no TCP, but other protocols are open" if self.deny_tcp else "THE NETWORK IS OPEN"

    def describe(self) -> str:
        """One line for the log."""
        files = "files outside its folder are closed" if self.files else "FILES ARE OPEN"
        processes = "" if self.counts_processes else "; THE NUMBER OF PROCESSES IS NOT LIMITED"
        return f"programs run with {self.network}; {files}{processes}"

    @property
    def counts_processes(self) -> bool:
        """Whether the limit of processes holds: in a namespace of its own only, since elsewhere it
        would count those of other programs of the user.
        """
        return self.namespaces and (self.counted or os.getuid() != 0)


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one program.

    Attributes:
        time_limit_s: wall clock and processor time.
        memory_bytes: address space of each of its processes.
        max_processes: processes and threads.
        file_bytes: largest file it may write, its output included.
    """

    time_limit_s: float
    memory_bytes: int
    max_processes: int
    file_bytes: int

    def rlimits(self, rights: Rights) -> dict[str, int]:
        """By the names of setrlimit(2)."""
        processes = {"NPROC": self.max_processes} if rights.counts_processes else {}
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
        exit_code: negative or above 128: by a signal; ``None``: killed at the time limit.
        stdout: its first MiB, undecodable bytes replaced.
        stderr: likewise.
    """

    exit_code: int | None
    stdout: str
    stderr: str


class SandboxError(RuntimeError):
    """The sandbox does not work; the program is not to blame."""


def run_python(
    arguments: list[str], stdin: str, files: dict[str, str], limits: SandboxLimits, rights: Rights
) -> Ended:
    """Run ``python ARGUMENTS`` in a folder of its own with these files. Blocks.

    Raises:
        SandboxError: a right could not be given up; the program was not started.
    """
    with _folder(files) as folder:
        return _run([sys.executable, "-I", "-B", *arguments], stdin, folder, limits, rights)


def probe(limits: SandboxLimits) -> Rights:
    """What can be taken from a program on this machine: as much as still lets one run. Blocks.

    Raises:
        SandboxError: not even a program with all rights runs.
    """
    rights = Rights(False, False, False, False)
    error = _refusal(rights, limits)
    if error:
        raise SandboxError(f"no program can be started on this machine: {error}")
    root = os.getuid() == 0
    for name, wanted in (("namespaces", True), ("counted", root), ("files", True)):
        more = replace(rights, **{name: True})
        if wanted and not _refusal(more, limits):
            rights = more
    without_tcp = replace(rights, deny_tcp=True)
    if rights.files and not rights.namespaces and not _refusal(without_tcp, limits):
        return without_tcp
    return rights


def _refusal(rights: Rights, limits: SandboxLimits) -> str:
    """Why a program does not run with these rights; empty when it does."""
    patient = replace(limits, time_limit_s=_PROBE_TIME_S)
    try:
        ended = run_python(
            ["-c", "open('x', 'w').write('1'); print(6 * 7)"], "", {}, patient, rights
        )
    except SandboxError as error:
        return str(error)
    if ended.stdout == "42\n" and ended.exit_code == 0:
        return ""
    return f"exit code {ended.exit_code}: {ended.stderr[-_SHOWN_CHARS:]}"


@contextmanager
def _folder(files: dict[str, str]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mindspeed_rl-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for path, text in files.items():
            (folder / path).write_text(text, encoding="utf-8")
        yield folder


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """The two ends; reading does not wait."""
    readable, writable = os.pipe()
    try:
        os.set_blocking(readable, False)
        yield readable, writable
    finally:
        os.close(readable)
        os.close(writable)


def _run(
    command: list[str], stdin: str, folder: Path, limits: SandboxLimits, rights: Rights
) -> Ended:
    prefixes = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)}
    asked: dict[str, object] = {
        "counted": rights.counted,
        "namespaces": rights.namespaces,
        "files": rights.files,
        "deny_tcp": rights.deny_tcp,
        "readable": [*sorted(prefixes), *_SYSTEM, *_DEVICES],
        "writable": [str(folder), "/dev/null"],
        "limits": limits.rlimits(rights),
    }
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(folder)}
    # Files and not pipes: their size is limited, and nobody has to read them.
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
            [
                sys.executable,
                "-I",
                "-S",
                _LAUNCHER,
                json.dumps(asked),
                *command,
            ],
            stdin=source,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env=environment,
            # A group of its own, to be killed whole; it stays in the session of the worker, whose
            # end kills the launcher and what it started.
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
