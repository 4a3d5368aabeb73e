"""A store of torch that listens where it was told to, and not on every interface.

``TCPStore`` takes a host to connect to; what it opens itself listens on all interfaces. Whoever
reaches a store can redirect the connections of a job, so it listens as narrowly as the job allows:

    python -m mindspeed_rl.launch.bound_store TORCHRUN ARGUMENTS

is torchrun with such a store.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import runpy
import secrets
import socket
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from mindspeed_rl.launch.failures import USAGE_ERROR

MARK = "MINDSPEED_RL_LAUNCHER_MARK"  # key that the launcher of a rank has set in its store
_LOCAL_NAMES = ("localhost", "localhost.localdomain")


def bind_address(host: str) -> str:
    """Return the address to listen on for those who connect to ``host``; empty: on all.

    Names but that of this machine's loopback are resolved by every node for itself, maybe to
    different addresses of the same machine.
    """
    if host in _LOCAL_NAMES:
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return ""


def bound_socket(host: str, port: int) -> socket.socket | None:
    """Return a socket that is bound for ``host``; ``None`` where it has to be on all interfaces.

    An address that no interface of this machine has, as behind a translated one, is such a case.

    Raises:
        OSError: The port is taken.
    """
    address = bind_address(host)
    if not address:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return None
    return listener


class BoundStore(TCPStore):
    """``TCPStore`` whose server listens on the address of ``host`` alone, where it is one."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *others: Any,
        **named: Any,
    ) -> None:
        if is_master and named.get("master_listen_fd") is None:
            try:
                listener = bound_socket(host_name, port)
            except OSError as error:
                raise dist.DistNetworkError(
                    f"the store cannot listen on {host_name}:{port}: {error}"
                ) from error
            if listener is not None:
                port = listener.getsockname()[1]
                named["master_listen_fd"] = listener.detach()
                host_name = "127.0.0.1" if host_name in _LOCAL_NAMES else host_name
        super().__init__(host_name, port, world_size, is_master, *others, **named)


class LauncherStore(BoundStore):
    """The store of a launcher, which leaves a mark there that its ranks look for."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        os.environ[MARK] = f"mindspeed_rl/launcher/{secrets.token_hex(8)}"
        self.set(os.environ[MARK], "1")


def is_of_launcher(store: TCPStore) -> bool:
    """Whether this is the store in which the launcher of this rank, if it has one, met the others.

    Where the launcher of the first node has been started again, another store has its port.
    """
    mark = os.environ.get(MARK)
    return mark is None or bool(store.check([mark]))


def main() -> None:
    """Run torchrun, whose modules take the store from ``torch.distributed``."""
    dist.TCPStore = LauncherStore  # type: ignore[attr-defined]
    try:
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    except ChildFailedError as error:
        if error.get_first_failure()[1].exitcode != USAGE_ERROR:
            raise
        sys.exit(USAGE_ERROR)  # the ranks have told the mistake; a traceback would hide it


if __name__ == "__main__":
    main()
