"""Gives up rights, then becomes a program: ``python -I -S sandbox_launcher.py JSON COMMAND...``.

Started by :mod:`mindspeed_rl.rewards.sandbox`; imports the standard library only. It gives up every
right that JSON names, or ends with the reason on stderr. It reports the start of the command on a
file descriptor that the command does not get: whatever the command does, and however it ends, is
never taken for a failure of the sandbox.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any

STARTED = b"S"

_CLONE_NEWIPC, _CLONE_NEWUSER = 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_FILTER_LINE_BYTES = 8
# landlock(7); the numbers are the same on all 64-bit architectures of Linux since 5.13.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_RULE_PATH_BENEATH = 1
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read file, read directory
_FILE_ONLY = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14
_MAKE_DEVICE = 1 << 6 | 1 << 11  # character and block devices
_NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl(PR_SET_PDEATHSIG)")


def be_counted() -> None:
    """Change the real user to nobody, since the processes of root are not counted.

    The other user ids, which file access uses, stay, so that an interpreter that only root can
    read stays readable.
    """
    os.setresuid(_NOBODY, 0, 0)


def leave_namespaces() -> None:
    """Enter namespaces with an unconfigured loopback as network, and without other processes."""
    flags = _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWIPC
    _check(_libc.unshare(flags), "unshare(user, network, processes)")


def _handled_files(abi: int) -> int:
    """Return the bits of the file rights that a landlock ABI knows."""
    return (1 << (13 if abi < 2 else 14 if abi < 3 else 15)) - 1


def drop_capabilities() -> None:
    """Give up for good what root may do besides using its own files."""
    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
        last = int(file.read())
    for capability in range(last + 1):
        _check(_libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), "prctl(PR_CAPBSET_DROP)")


def restrict_files(readable: list[str], writable: list[str]) -> None:
    """Forbid reading and writing anything outside these trees (landlock)."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    abi = _check(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1), "landlock")
    handled = _handled_files(abi)
    attribute = struct.pack("Q", handled)
    ruleset = _check(
        _libc.syscall(_LANDLOCK_CREATE, attribute, len(attribute), 0), "landlock_create_ruleset"
    )
    for paths, rights in ((readable, _READ), (writable, handled & ~_MAKE_DEVICE)):
        for path in paths:
            if not os.path.exists(path):
                continue
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights & handled
            if not os.path.isdir(path):
                allowed &= _FILE_ONLY
            rule = struct.pack("=Qi", allowed, fd)
            _check(
                _libc.syscall(_LANDLOCK_ADD, ruleset, _RULE_PATH_BENEATH, rule, 0),
                f"landlock_add_rule({path})",
            )
            os.close(fd)
    _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def filter_calls(program: bytes) -> None:
    """Put a filter of system calls (seccomp) in front of all that this process will do."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    lines = ctypes.create_string_buffer(program, len(program))
    count = len(program) // _FILTER_LINE_BYTES
    described = struct.pack("HxxxxxxQ", count, ctypes.addressof(lines))
    _check(
        _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0),
        "prctl(PR_SET_SECCOMP)",
    )


def set_limits(limits: dict[str, int]) -> None:
    """Set ``{"CPU": 2, ...}`` as ``RLIMIT_CPU`` and so on, soft and hard."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def launch(asked: dict[str, Any], command: list[str]) -> None:
    """Give up what is asked for, then run the command; its exit code is this process's."""
    die_with_parent()
    os.nice(5)  # so that training goes first
    if asked["counted"]:
        be_counted()
        die_with_parent()  # a change of the user resets it
    if asked["namespaces"]:
        leave_namespaces()
        # Only children enter the new process namespace, and the end of its first process ends all.
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        die_with_parent()
    elif os.geteuid() == 0:  # in a user namespace it has no rights outside
        drop_capabilities()
    if asked["files"]:
        restrict_files(asked["readable"], asked["writable"])
    set_limits(asked["limits"])
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.set_inheritable(asked["report_fd"], False)
    if asked["filter"]:
        filter_calls(bytes.fromhex(asked["filter"]))
    os.write(asked["report_fd"], STARTED)
    os.execv(command[0], command)


if __name__ == "__main__":
    try:
        assert platform.system() == "Linux", "the sandbox needs Linux"
        launch(json.loads(sys.argv[1]), sys.argv[2:])
    except BaseException as error:
        sys.exit(f"sandbox: {type(error).__name__}: {error}")
