"""Groups the trainer's device memory into parts that can be released and restored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mindspeed_rl.colocation.host_pool import HostPool
from mindspeed_rl.colocation.storage_group import StorageGroup
from mindspeed_rl.core.memory import MemoryOwner
from mindspeed_rl.trainer.owned_tensors import (
    gradient_tensors,
    optimizer_tensors,
    parameter_tensors,
    parameters_of,
)
from mindspeed_rl.trainer.train_engine import TrainEngine


def trainer_memory(
    policy: TrainEngine,
    reference: TrainEngine | None = None,
    critic: TrainEngine | None = None,
    reward_model: TrainEngine | None = None,
) -> dict[MemoryOwner, StorageGroup]:
    """Return a storage group for every owner of the trainer's device memory. Local.

    Gradients are dropped: every update zeroes them before its first micro-batch. All other groups
    keep their content in one pool of host memory; models that only read are copied there once.
    Optimizer state, hundreds of tensors, comes back as one storage.
    """
    pool = HostPool(policy.platform)
    trained = (MemoryOwner.PARAMETERS, MemoryOwner.GRAD_BUFFERS, MemoryOwner.OPTIMIZER)
    groups = _trained(policy, pool, *trained)
    if critic is not None:
        parts = (MemoryOwner.CRITIC, MemoryOwner.CRITIC_GRAD_BUFFERS, MemoryOwner.CRITIC_OPTIMIZER)
        groups |= _trained(critic, pool, *parts)
    for owner, engine in (
        (MemoryOwner.REFERENCE, reference),
        (MemoryOwner.REWARD_MODEL, reward_model),
    ):
        if engine is not None:
            find = partial(parameter_tensors, parameters_of(engine.modules))
            groups[owner] = StorageGroup(
                owner, find, engine.platform, pool, num_writes=_writes_of(engine)
            )
    return groups


def _writes_of(engine: TrainEngine) -> Callable[[], int]:
    return lambda: engine.num_writes


def _trained(
    engine: TrainEngine,
    pool: HostPool,
    parameters: MemoryOwner,
    gradients: MemoryOwner,
    optimizer: MemoryOwner,
) -> dict[MemoryOwner, StorageGroup]:
    """Return the groups of parameters, gradients and optimizer state of an engine that updates."""
    # Parameters are listed once: walking the modules takes longer than the rest of a release.
    platform, held = engine.platform, parameters_of(engine.modules)
    find = partial(parameter_tensors, held)
    return {
        parameters: StorageGroup(parameters, find, platform, pool),
        gradients: StorageGroup(
            gradients,
            partial(gradient_tensors, engine.models, held),
            platform,
            None,
            before_release=engine.release_step_state,
        ),
        optimizer: StorageGroup(
            optimizer,
            lambda: optimizer_tensors(engine.optimizer, find()),
            platform,
            pool,
            packs=True,
        ),
    }
