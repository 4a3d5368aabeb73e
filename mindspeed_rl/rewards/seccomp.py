"""The filter of system calls of a sandboxed program (seccomp), as a program of classic BPF.

Landlock knows files and namespaces know processes and networks; what neither of them closes is
refused here: sockets to programs of this machine, signals to and memory of other processes, modes
and owners of files by their path, memory that no limit counts, and ways out of the other fences. It
needs no rights, so it holds in containers without user namespaces as well.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator
from dataclasses import dataclass

# Numbers of system calls by machine; 0: the machine has no such call.
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS: dict[str, tuple[int, int]] = {
    # Mode, owner and time of any file of the user. The filter cannot see paths.
    "chmod": (90, 0), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, 0), "fchown": (93, 55), "lchown": (94, 0), "fchownat": (260, 54),
    "utime": (132, 0), "utimes": (235, 0), "futimesat": (261, 0), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setxattrat": (463, 463),
    "removexattrat": (466, 466), "file_setattr": (469, 469),
    # Other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "kcmp": (312, 272), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "setsid": (112, 157), "setpgid": (109, 154),
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "clone": (56, 220), "clone3": (435, 435), "fork": (57, 0), "vfork": (58, 0),
    "prctl": (157, 167),
    # Sockets.
    "socket": (41, 198), "socketpair": (53, 199),
    # Memory that outlives the program, or that no limit of it counts.
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # Parts of the kernel that a program has no use for, and ways around this filter.
    "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "bpf": (321, 280),
    "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "fsopen": (430, 430),
    "fsmount": (432, 432), "fspick": (433, 433), "open_tree": (428, 428), "move_mount": (429, 429),
    "mount_setattr": (442, 442), "inotify_init": (253, 0), "inotify_init1": (294, 26),
    "fanotify_init": (300, 262), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104),
    "reboot": (169, 142), "swapon": (167, 224), "acct": (163, 89), "syslog": (103, 116),
    "quotactl": (179, 60),
}  # fmt: skip
# Programs copy files with their modes and times: they go on, and nothing changes.
_IDLE = (
    "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat"
)
_OWN_PROCESS_ONLY = "prlimit64 sched_setaffinity sched_setscheduler sched_setparam sched_setattr"
_SIGNALS = "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal setsid setpgid"
# Libraries have another way where these are missing from the kernel.
_MISSING = "clone3 memfd_create memfd_secret io_uring_setup userfaultfd fchmodat2 setxattrat"

_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
_NUMBER, _MACHINE = 0, 4  # offsets in struct seccomp_data
_X32 = 0x40000000  # calls of x86_64 by other numbers
_NEW_NAMESPACES, _THREAD = 0x7E020080, 0x00010000  # bits of clone(2)
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
_FAMILIES = (2, 10)  # AF_INET, AF_INET6: in a network namespace they lead nowhere
_TYPE_BITS, _DATAGRAM = 0xF, 2


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the filter leaves to a program because another fence holds it.

    Attributes:
        internet: Whether it may open internet sockets, which have no network to speak to.
        signals: Whether it may send signals and leave its process group: it sees its own processes.
        processes: Whether it may start processes: they are counted.
    """

    internet: bool
    signals: bool
    processes: bool


def filter_program(allowed: Allowed, machine: str = "") -> bytes:
    """Return the instructions of the filter; empty: this machine's calls are not known.

    Args:
        allowed: What other fences hold.
        machine: As `platform.machine` names it; empty: this one.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        return b""
    column = list(_MACHINES).index(machine)
    lines = [
        (_LOAD, 0, 0, _MACHINE),
        (_IF_EQUAL, 1, 0, _MACHINES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for name, numbers in _CALLS.items():
        if number := numbers[column]:
            body = list(_verdict(name, allowed))
            lines += [(_IF_EQUAL, 0, len(body), number), *body]
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


_Line = tuple[int, int, int, int]


def _verdict(name: str, allowed: Allowed) -> Iterator[_Line]:
    """Yield the instructions that end in a verdict on a call."""
    refused = (_RETURN, 0, 0, _REFUSE | errno.EACCES)
    passed = (_RETURN, 0, 0, _ALLOW)
    if name in _IDLE.split():
        yield (_RETURN, 0, 0, _REFUSE)  # with error 0: it returns success
    elif name in _MISSING.split():
        yield (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)
    elif (name in _SIGNALS.split() and allowed.signals) or (
        name in ("fork", "vfork") and allowed.processes
    ):
        yield passed
    elif name == "clone":
        yield _argument(0)
        yield (_IF_ANY_BIT, 0, 1, _NEW_NAMESPACES)
        yield refused
        if not allowed.processes:
            yield (_IF_ANY_BIT, 1, 0, _THREAD)
            yield refused
        yield passed
    elif name in _OWN_PROCESS_ONLY.split() or name == "prctl":
        yield _argument(0)
        equal = name != "prctl"  # the calling process is number 0
        yield (_IF_EQUAL, int(equal), int(not equal), 0 if equal else _SET_PARENT_DEATH_SIGNAL)
        yield refused
        yield passed
    elif name == "socket" and allowed.internet:
        yield _argument(0)
        yield (_IF_EQUAL, 2, 0, _FAMILIES[0])
        yield (_IF_EQUAL, 1, 0, _FAMILIES[1])
        yield refused
        yield passed
    elif name == "socketpair":
        yield _argument(1)
        yield (_AND, 0, 0, _TYPE_BITS)
        yield (_IF_EQUAL, 0, 1, _DATAGRAM)  # could be sent to a socket with a path
        yield refused
        yield passed
    else:
        yield refused


def _argument(position: int) -> _Line:
    """Load the lower half of an argument; both machines are little-endian."""
    return (_LOAD, 0, 0, 16 + 8 * position)
