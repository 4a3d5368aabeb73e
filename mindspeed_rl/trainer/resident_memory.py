"""The trainer's device memory, as groups that leave and come back."""

from __future__ import annotations

from functools import partial

from mindspeed_rl.memory.owners import Owner
from mindspeed_rl.offload.group import StorageGroup
from mindspeed_rl.offload.host_pool import HostPool
from mindspeed_rl.trainer.owned_tensors import (
    gradient_tensors,
    optimizer_tensors,
    parameter_tensors,
)
from mindspeed_rl.trainer.train_engine import TrainEngine


def trainer_memory(policy: TrainEngine, reference: TrainEngine | None) -> dict[Owner, StorageGroup]:
    """Every owner of the trainer's device memory. Local.

    Gradients are dropped: every update zeroes them before its first micro-batch. Everything else
    keeps its content in one pool of host memory.
    """
    platform = policy.platform
    pool = HostPool(platform)
    parameters = partial(parameter_tensors, policy.modules)
    groups = {
        Owner.PARAMETERS: StorageGroup(Owner.PARAMETERS, parameters, platform, pool),
        Owner.GRAD_BUFFERS: StorageGroup(
            Owner.GRAD_BUFFERS,
            partial(gradient_tensors, policy.models),
            platform,
            None,
            before_release=policy.let_go,
        ),
        Owner.OPTIMIZER: StorageGroup(
            Owner.OPTIMIZER,
            lambda: optimizer_tensors(policy.optimizer, parameters()),
            platform,
            pool,
        ),
    }
    if reference is not None:
        modules = reference.modules
        find = partial(parameter_tensors, modules)
        groups[Owner.REFERENCE] = StorageGroup(Owner.REFERENCE, find, platform, pool)
    return groups
