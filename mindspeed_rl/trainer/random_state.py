"""The random generators of a rank, as a checkpoint keeps them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mindspeed_rl.platforms.base import Platform


def rng_state(platform: Platform) -> dict[str, Any]:
    """Every generator that a rank draws from, in types that ``torch.load`` trusts."""
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
    """Counterpart of :func:`rng_state`."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    platform.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["megatron"])
