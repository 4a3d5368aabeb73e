"""Shares one network thread of gloo between all process groups of a process.

PyTorch gives every gloo group a device of its own, whose thread wakes every 10 ms even when the
group is idle. A rank is in about thirty groups (megatron-core's axes and the engine's), most of
which are idle: on two cores their threads take a few percent of a step. With a shared device the
connections of all groups are in one epoll set.

Why: the default constructor of ``ProcessGroupGloo`` takes no devices.
Upstream: torch/csrc/distributed/c10d/init.cpp (the constructor with a timeout makes the devices);
    gloo/transport/tcp/loop.cc (the 10 ms).
Versions: torch 2.13.0.
Remove when: c10d shares devices between groups, or ``new_group`` takes options of gloo.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_THREADS_PER_DEVICE = 2  # PyTorch's default number of threads for the collectives of a group


@functools.cache
def share_devices() -> None:
    """Make all gloo groups that this process creates later share their devices. Idempotent."""
    group: Any = dist.ProcessGroupGloo
    make = vars(group)["__init__"]

    def with_shared(
        self: Any, store: Any, rank: int, size: int, options: Any = None, *, timeout: Any = None
    ) -> None:
        if isinstance(options, timedelta):  # the overload with a timeout, by position
            options, timeout = None, options
        if options is None:
            options = group._Options()
            options._devices = _devices()
            options._threads = _THREADS_PER_DEVICE * len(options._devices)
            if timeout is not None:
                options._timeout = timeout
        make(self, store, rank, size, options)

    group.__init__ = with_shared


@functools.cache
def _devices() -> list[Any]:
    """Create devices for the interfaces in ``GLOO_SOCKET_IFNAME``, or for the host's address."""
    group: Any = dist.ProcessGroupGloo
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [group.create_device(interface=name) for name in names.split(",")]
    return [group.create_default_device()]
