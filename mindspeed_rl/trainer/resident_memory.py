"""Groups the trainer's device memory into parts that can be released and restored.

With the distributed optimizer megatron-core keeps all parameters of a kind (dense, expert) in one
buffer and their gradients in another. Main parameters are views of the parameter buffer in fp32 and
copies in bf16. Owners are distinguished by storage, so every byte counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from mindspeed_rl.colocation.host_pool import HostPool
from mindspeed_rl.colocation.storage_group import StorageGroup
from mindspeed_rl.core.memory import MemoryOwner
from mindspeed_rl.platforms.storages import not_among
from mindspeed_rl.trainer.optimizer import torch_optimizers
from mindspeed_rl.trainer.train_engine import TrainEngine


def trainer_memory(
    policy: TrainEngine,
    reference: TrainEngine | None = None,
    critic: TrainEngine | None = None,
    reward_model: TrainEngine | None = None,
    teachers: Sequence[TrainEngine] = (),
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
    readers = {
        MemoryOwner.REFERENCE: [reference] if reference else [],
        MemoryOwner.REWARD_MODEL: [reward_model] if reward_model else [],
        MemoryOwner.TEACHERS: teachers,
    }
    groups |= {o: _read_only(engines, pool, o) for o, engines in readers.items() if engines}
    return groups


def _read_only(engines: Sequence[TrainEngine], pool: HostPool, owner: MemoryOwner) -> StorageGroup:
    find, platform = _parameters_of(*engines), engines[0].platform
    return StorageGroup(
        owner, find, platform, pool, num_writes=lambda: sum(e.num_writes for e in engines)
    )


def _trained(
    engine: TrainEngine,
    pool: HostPool,
    parameters: MemoryOwner,
    gradients: MemoryOwner,
    optimizer: MemoryOwner,
) -> dict[MemoryOwner, StorageGroup]:
    """Return the groups of parameters, gradients and optimizer state of an engine that updates."""
    platform, find = engine.platform, _parameters_of(engine)
    return {
        parameters: StorageGroup(parameters, find, platform, pool),
        gradients: StorageGroup(
            gradients,
            lambda: _gradients_of(engine),
            platform,
            None,
            before_release=engine.release_step_state,
        ),
        optimizer: StorageGroup(
            optimizer,
            lambda: not_among(_optimizer_tensors(engine), find()),
            platform,
            pool,
            packs=True,
        ),
    }


def _parameters_of(*engines: TrainEngine) -> Callable[[], list[torch.Tensor]]:
    """Return a function that lists the parameters' data; buffers always stay on the device.

    The parameters are found only once: walking the modules takes longer than the rest of a release.
    """
    parameters = [p for engine in engines for m in engine.modules for p in m.parameters()]
    return lambda: [p.data for p in parameters]


def _gradients_of(engine: TrainEngine) -> list[torch.Tensor]:
    """Return the gradient buffers; an update leaves no gradients outside of them."""
    models = engine.models
    return [b.grad_data for m in models for b in (*m.buffers, *m.expert_parallel_buffers)]


def _optimizer_tensors(engine: TrainEngine) -> Iterator[torch.Tensor]:
    """Yield the main parameters, and AdamW's moments after its first step.

    Step counters (one number each, which AdamW reads on the host) are not among them.
    """
    for part in torch_optimizers(engine.optimizer):
        for group in part.param_groups:
            for param in group["params"]:
                yield param
                for value in part.state.get(param, {}).values():
                    if isinstance(value, torch.Tensor) and value.dim():
                        yield value
