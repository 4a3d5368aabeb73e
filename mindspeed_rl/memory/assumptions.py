"""What predictions of memory assume beside the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mindspeed_rl.memory.layers import Kernels
from mindspeed_rl.memory.owners import OffloadMode


@dataclass(frozen=True, slots=True)
class MemoryAssumptions:
    """What the configuration does not say.

    Attributes:
        kernels: operators of the trainer.
        offload: what leaves during rollouts; not ``AUTO``.
        train_imbalance: tokens of the busiest expert-parallel rank in training, by the mean.
        rollout_imbalance: the same in the engine.
        communicator_bytes: device buffers of one communicator; 0 on CPU.
        group_bytes: of those that have another size, by the name of their group.
        engine_mc2: see :class:`~mindspeed_rl.memory.communicators.GroupUse`.
        graph_bytes: of one captured engine step size.
        copies_latent: see :class:`~mindspeed_rl.memory.engine.EngineMemory`.
        latent_block_tokens: likewise.
        swap_parts: optimizer state is on the host and passes through the device in so many parts
            (MindSpeed's ``--swap-optimizer``); 0: it is on the device.
        staging_bytes: of a reshard by rank, where the plan is known; else the whole bucket counts.
    """

    kernels: Kernels = Kernels.EAGER
    offload: OffloadMode = OffloadMode.NONE
    train_imbalance: float = 1.0
    rollout_imbalance: float = 1.0
    communicator_bytes: int = 0
    group_bytes: Mapping[str, int] = field(default_factory=dict)
    engine_mc2: bool = False
    graph_bytes: int = 0
    copies_latent: bool = False
    latent_block_tokens: int = 16
    swap_parts: int = 0
    staging_bytes: Mapping[int, int] = field(default_factory=dict)
