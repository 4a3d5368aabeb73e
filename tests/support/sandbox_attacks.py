"""A program of a model that tries to reach what a sandbox says is closed, and the outside it tries.

Run as ``python sandbox_attacks.py RESTRICTIONS`` it prints as JSON which attacks got through.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mindspeed_rl.rewards.sandbox import Restrictions, SandboxLimits, run_python

MARKER = "mindspeed-rl-sandbox-survivor"
LIMITS = SandboxLimits(10.0, 512 << 20, 8, 1 << 20)

# Each attack is a function that returns something true where it reached what it should not.
ATTACKS = r"""
import ctypes, json, os, socket, stat, sys, threading, time
outside = json.loads(sys.stdin.read())
secret, victim, folder = outside["secret"], outside["victim"], outside["folder"]
libc = ctypes.CDLL(None, use_errno=True)

def reads_a_file(): return open(secret).read()
def writes_a_file(): return open(secret, "a").write("x")
def makes_a_file(): return open(folder + "/new", "w")
def removes_a_file(): return os.unlink(folder + "/victim") is None
def renames_a_file(): return os.rename(folder + "/victim", folder + "/moved") is None
def links_a_file(): return os.link(secret, "link") is None and open("link").read()
def follows_a_link(): return os.symlink(secret, "soft") is None and open("soft").read()
def truncates_a_file(): return os.truncate(secret, 0) is None
def lists_a_folder(): return os.listdir(folder)
def makes_a_device(): return os.mknod("device", stat.S_IFCHR | 0o600, os.makedev(1, 8)) is None
def sees_environments():
    return b"SECRET" in open(f"/proc/{victim}/environ", "rb").read()
def writes_memory(): return open(f"/proc/{victim}/mem", "r+b")
def kills(): return os.kill(victim, 9) is None
def kills_all(): return os.kill(-1, 0) is None and not os.getpid() == 1 and 0
def traces(): return libc.ptrace(16, victim, 0, 0) == 0
def reads_memory():
    class Piece(ctypes.Structure): _fields_ = [("at", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    here = ctypes.create_string_buffer(8)
    return libc.process_vm_readv(victim, ctypes.byref(Piece(ctypes.addressof(here), 8)), 1,
        ctypes.byref(Piece(ctypes.addressof(here), 8)), 1, 0) >= 0
def limits_others():
    import resource
    return resource.prlimit(victim, resource.RLIMIT_NOFILE, (3, 3)) and victim != os.getpid()
def speaks_tcp(): return socket.create_connection(("127.0.0.1", outside["port"]), 1)
def speaks_udp():
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 9))
def speaks_to_a_path():
    speaker = socket.socket(socket.AF_UNIX); speaker.connect(folder + "/stream"); return 1
def sends_to_a_path():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", folder + "/gram")
def speaks_abstractly():
    speaker = socket.socket(socket.AF_UNIX); speaker.connect("\0" + outside["abstract"]); return 1
def speaks_to_the_host(): return socket.socket(40, socket.SOCK_STREAM)  # AF_VSOCK
def speaks_to_the_kernel(): return socket.socket(16, socket.SOCK_RAW)  # AF_NETLINK
def shares_memory(): return libc.shmget(0x4D53, 1 << 20, 0o1600) >= 0
def hides_memory(): return os.memfd_create("x")
def enters_namespaces(): return libc.unshare(0x10000000) == 0
def rings(): return libc.syscall(425, 8, ctypes.create_string_buffer(256)) >= 0
def keeps_keys(): return libc.syscall(248, b"user", b"x", b"y", 1, -3) > 0
def inherits_descriptors():
    found = []
    for fd in range(3, 64):
        try: os.fstat(fd); found.append(fd)
        except OSError: pass
    return found
def has_variables(): return set(os.environ) - {"PATH", "LANG", "HOME", "LC_CTYPE"}
def outlives_its_parent(): return libc.prctl(1, 0, 0, 0, 0) == 0
def takes_memory(): return bytearray(2 << 30)
def takes_processes():
    started = 0
    for _ in range(40):
        try:
            if os.fork() == 0: time.sleep(5); os._exit(0)
            started += 1
        except OSError: break
    return started > 8 and started
def changes_modes(): os.chmod(secret, 0o666)
def changes_times(): os.utime(secret, (1, 1))
def changes_priorities(): os.setpriority(os.PRIO_USER, 0, 19)
def leaves_a_process():
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                libc.prctl(1, 0, 0, 0, 0)
                os.execv("/bin/sleep", [outside["marker"], "60"])
            os._exit(0)
    except OSError: pass
    time.sleep(0.2)

reached = []
for name, attack in list(globals().items()):
    if callable(attack) and getattr(attack, "__module__", "") == "__main__":
        try:
            if attack(): reached.append(name)
        except (OSError, MemoryError, AttributeError): pass
print(json.dumps(reached))
sys.stdout.flush()
"""


def _listeners(folder: Path) -> tuple[list[socket.socket], int, str]:
    """Open a socket of every kind that a program could find."""
    tcp = socket.create_server(("127.0.0.1", 0))
    stream = socket.socket(socket.AF_UNIX)
    stream.bind(str(folder / "stream"))
    gram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    gram.bind(str(folder / "gram"))
    abstract = socket.socket(socket.AF_UNIX)
    name = f"mindspeed-rl-{os.getpid()}"
    abstract.bind("\0" + name)
    for listener in (stream, abstract):
        listener.listen()
    return [tcp, stream, gram, abstract], tcp.getsockname()[1], name


def attack(restrictions: Restrictions) -> list[str]:
    """Run all attacks in a sandbox; return those that reached or changed something outside."""
    with tempfile.TemporaryDirectory(prefix="outside-") as name:
        folder = Path(name)
        secret = folder / "secret"
        secret.write_text("42")
        secret.chmod(0o600)
        (folder / "victim").write_text("7")
        sockets, port, abstract = _listeners(folder)
        before = secret.stat()
        victim = subprocess.Popen(["/bin/sleep", "60"], env={"SECRET": "1"})
        priority = _priority(victim)
        outside = {
            "secret": str(secret), "folder": str(folder), "victim": victim.pid, "port": port,
            "abstract": abstract, "marker": f"{MARKER}-{os.getpid()}",
        }  # fmt: skip
        try:
            ended = run_python(["-c", ATTACKS], json.dumps(outside), {}, LIMITS, restrictions)
            reached = json.loads(ended.stdout or "null")
            assert reached is not None and ended.exit_code == 0, ended
            after = secret.stat()
            changed = {
                "changes_modes": after.st_mode != before.st_mode,
                "changes_times": after.st_mtime != before.st_mtime,
                "changes_content": secret.read_text() != "42",
                "changes_priorities": _priority(victim) != priority,
                "ends_processes": victim.poll() is not None,
                "leaves_a_process": _survivors(outside["marker"]),
            }
            return reached + [name for name, did in changed.items() if did]
        finally:
            victim.kill()
            victim.wait()
            for one in sockets:
                one.close()


def _priority(process: subprocess.Popen[bytes]) -> int:
    """Niceness of a process that has not been waited for."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[16])


def _survivors(marker: str) -> bool:
    """Whether a process with this name is left a moment after its program; it is ended."""
    for _ in range(20):
        found = []
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if place.read_bytes().split(b"\0")[0] == marker.encode():
                    found.append(int(place.parent.name))
        if not found:
            return False
        time.sleep(0.05)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return True


if __name__ == "__main__":
    print(json.dumps(attack(Restrictions(**json.loads(sys.argv[1])))))
