"""Saves and restores the random generators of a rank for checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mindspeed_rl.platforms.base import Platform


def rng_state(platform: Platform) -> dict[str, Any]:
    """Return the states of all generators that a rank uses, in types that ``torch.load`` trusts."""
    numbers: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, gauss = numbers
    return {
        "python": random.getstate(),
        "numpy": (str(kind), keys.tolist(), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "device": platform.rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(platform: Platform, state: dict[str, Any]) -> None:
    """Restore all generators from a result of :func:`rng_state`."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    platform.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["megatron"])
