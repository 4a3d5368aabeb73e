"""Protects the trainer's random generators and environment from the engine in its process.

vLLM seeds the global random generators when it is built, draws from them when it samples (by an
amount that depends on the local batch, so ranks would diverge), and rewrites the environment.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from mindspeed_rl.platforms.base import Platform

# Variables that the running engine, CANN and its tools go on reading.
_KEPT = ("VLLM_", "ASCEND_")
# vLLM reads it while it builds an engine, and another engine must not.
_OF_BUILD = ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY",)


@contextmanager
def preserved_rng(platform: Platform) -> Iterator[None]:
    """Restore the generators of Python, numpy, torch and the device afterwards."""
    python, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.get_rng_state()
    device_state = platform.rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        platform.set_rng_state(device_state)


@contextmanager
def preserved_environment() -> Iterator[None]:
    """Restore environment variables afterwards, except those of vLLM and of Ascend.

    Otherwise ``LOCAL_WORLD_SIZE`` would become the engine's size, and every child process would
    inherit ``LD_PRELOAD``.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            if not _stays(name):
                del os.environ[name]
        os.environ |= {n: value for n, value in before.items() if not _stays(n)}


def _stays(name: str) -> bool:
    """Whether the running engine goes on reading a variable."""
    return name.startswith(_KEPT) and name not in _OF_BUILD
