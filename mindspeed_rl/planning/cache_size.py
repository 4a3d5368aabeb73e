"""Chooses the engine's key/value cache where ``--rollout-kv-cache-gb`` leaves it open.

A size that is given is compared with what the rollouts of a rank want.
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.memory import FIXED_MODES, MemoryPhase, OffloadMode
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.run_plan import RLPlan

_GIB = 2**30
_FEW = 0.25  # of the sequences of a rank; a cache that holds fewer is told
_FILLED = 0.95  # of a device, as far as a cache is chosen: predictions are that good


def with_cache_size(
    prediction: MemoryPrediction, usable: int, *, shared: bool = False
) -> tuple[RLRunConfig, list[str]]:
    """Return the configuration of a run with the size of its cache, and a line about it. Pure.

    The cache holds all sequences of the rank at their longest, or as many as fit beside what else
    is on the device while the engine samples, at least one. ``--rl-offload auto`` is taken as the
    mode that moves most, because it is chosen afterwards, for the cache found here. Of a size that
    is given, there is a line only if it holds few sequences.

    Args:
        prediction: Prediction of the run; its offload mode does not matter.
        usable: Bytes of a device that predictions may fill.
        shared: The device is the host, whose memory others want as well: the cache takes half of
            what is left.
    """
    config, plan = prediction.config, prediction.plan
    assert isinstance(config, RLRunConfig) and isinstance(plan, RLPlan)
    sequences, sequence = _wanted(prediction, plan)
    if given := config.rollout.rollout_kv_cache_gb:
        held = max(1, int(given * _GIB) // sequence)
        return config, _few(given, held, sequences, plan.max_model_len)
    asked = OffloadMode(config.memory.rl_offload)
    mode = FIXED_MODES[-1] if asked is OffloadMode.AUTO else asked
    ranks = prediction.representatives()
    taken = replace(prediction, offload=mode).peaks(ranks)[MemoryPhase.ROLLOUT]
    left = max(0, int(_FILLED * usable) - taken) // (2 if shared else 1)
    fitting = max(1, min(sequences, left // sequence))
    size = fitting * sequence
    all_of_them = f"all {sequences}" if fitting == sequences else f"{fitting} of the {sequences}"
    line = (
        f"--rollout-kv-cache-gb: {size / _GIB:.3g} GiB, chosen to hold {all_of_them} sequences of "
        f"a rank at their full length of {plan.max_model_len} tokens"
    )
    if fitting < sequences:
        line += "; the others wait, or run beside them while they are shorter"
    rollout = replace(config.rollout, rollout_kv_cache_gb=size / _GIB)
    return replace(config, rollout=rollout), [line]


def _wanted(prediction: MemoryPrediction, plan: RLPlan) -> tuple[int, int]:
    """Return how many sequences a rank has at once, and the bytes of the longest."""
    engine = prediction.engine
    sequence = engine.token_bytes() * engine.sizes.sequence_tokens(plan.max_model_len)
    groups = plan.engine.num_replicas * plan.engine.dp
    return min(-(-plan.batch.samples // groups), engine.sizes.sequences), sequence


def _few(given: float, held: int, sequences: int, longest: int) -> list[str]:
    """Return a note about a cache that holds few sequences."""
    if held >= _FEW * sequences:
        return []
    return [
        f"note: --rollout-kv-cache-gb {given:g} holds {held} of the {sequences} sequences of a "
        f"rank at full length ({longest} tokens): where responses get that long, most wait for "
        "others. 0 chooses a size that fits beside the rest"
    ]
