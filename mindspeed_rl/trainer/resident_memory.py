"""The trainer's device memory, as groups that leave and come back."""

from __future__ import annotations

from functools import partial

from mindspeed_rl.memory.owners import CRITIC_OWNERS, Owner
from mindspeed_rl.offload.group import StorageGroup
from mindspeed_rl.offload.host_pool import HostPool
from mindspeed_rl.trainer.owned_tensors import (
    gradient_tensors,
    optimizer_tensors,
    parameter_tensors,
)
from mindspeed_rl.trainer.train_engine import TrainEngine


def trainer_memory(
    policy: TrainEngine,
    reference: TrainEngine | None,
    critic: TrainEngine | None = None,
    reward_model: TrainEngine | None = None,
) -> dict[Owner, StorageGroup]:
    """Every owner of the trainer's device memory. Local.

    Gradients are dropped: every update zeroes them before its first micro-batch. Everything else
    keeps its content in one pool of host memory.
    """
    pool = HostPool(policy.platform)
    owners = (Owner.PARAMETERS, Owner.GRAD_BUFFERS, Owner.OPTIMIZER)
    groups = _trained(policy, pool, *owners)
    for owner, engine in ((Owner.REFERENCE, reference), (Owner.REWARD_MODEL, reward_model)):
        if engine is not None:
            find = partial(parameter_tensors, engine.modules)
            groups[owner] = StorageGroup(owner, find, policy.platform, pool)
    if critic is not None:
        groups |= _trained(critic, pool, *CRITIC_OWNERS)
    return groups


def _trained(
    engine: TrainEngine, pool: HostPool, weights: Owner, gradients: Owner, optimizer: Owner
) -> dict[Owner, StorageGroup]:
    """The memory of a model that is trained, under these owners."""
    platform = engine.platform
    parameters = partial(parameter_tensors, engine.modules)
    return {
        weights: StorageGroup(weights, parameters, platform, pool),
        gradients: StorageGroup(
            gradients,
            partial(gradient_tensors, engine.models),
            platform,
            None,
            before_release=engine.let_go,
        ),
        optimizer: StorageGroup(
            optimizer,
            lambda: optimizer_tensors(engine.optimizer, parameters()),
            platform,
            pool,
        ),
    }
