"""Ranks that train with their memory taken away between the steps, and count what is left."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from support.queued_copies import QueuedCopies
from support.training_worlds import Case, make_loss, make_samples, start_job

from mindspeed_rl.colocation.scheduler import ColocationPlan
from mindspeed_rl.core.memory import MemoryOwner, OffloadMode
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.platforms.storages import num_bytes, storages_of

NUM_STEPS = 10
MODES = (OffloadMode.NONE, OffloadMode.OPTIMIZER, OffloadMode.ALL)
VOCAB = 67


@dataclass(frozen=True, slots=True)
class OffloadFacts:
    """What one rank saw.

    Attributes:
        weights: bit patterns of all parameters after the last step, by mode.
        reference: log-probs by the reference after the last step, by mode; last stage only.
        owned: bytes by owner before anything left, in the last step.
        freed: bytes by which the tensors of the process shrank, by mode, in the last step.
        left: bytes by owner that are still there after the last mode took everything.
        caches: bytes that token dispatchers keep of the last micro-batch.
        open_gradients: what is raised when gradients are accumulated and memory is taken.
    """

    weights: dict[str, list[torch.Tensor]]
    reference: dict[str, list[torch.Tensor]]
    owned: dict[str, int]
    freed: dict[str, int]
    left: dict[str, int]
    caches: int
    open_gradients: str


def tensor_bytes(device_only: set[int]) -> int:
    """Bytes of all storages that the garbage collector can reach, those of ``device_only`` aside.

    An oracle that knows nothing of owners.
    """
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(size for key, size in found.items() if key not in device_only)


def offload_world(world: World, model: str, flags: Sequence[str]) -> OffloadFacts:
    """Rank function: the same ten steps in every mode.

    With ``all``, copies of the policy are late, and the optimizer state begins to leave while its
    weights are read. In every other step it then stays.
    """

    facts = OffloadFacts({}, {}, {}, {}, {}, 0, "")
    for mode in MODES:
        job = start_job(world, model, flags)
        facts = _train(job, mode, facts)
    return facts


def _train(job, mode: OffloadMode, facts: OffloadFacts) -> OffloadFacts:  # type: ignore[no-untyped-def]
    from support.batches import local_batches

    from mindspeed_rl.building.models import build_engine
    from mindspeed_rl.trainer.resident_memory import trainer_memory

    policy = build_engine(job, "policy", NUM_STEPS)
    if mode is OffloadMode.ALL:
        policy.platform = QueuedCopies()
    reference = build_engine(job, "reference", 0)
    groups = trainer_memory(policy, reference)
    sharing = ColocationPlan(groups, mode, wait_for_copies=policy.platform.wait_for_copies)
    samples = make_samples(VOCAB)
    batches = local_batches(job, policy, samples)
    loss = make_loss(Case("sft", loss="sft"), samples, [])
    refusal = ""
    for step in range(NUM_STEPS):
        policy.forward_backward(batches, loss)
        if step == 0:
            try:
                groups[MemoryOwner.GRAD_BUFFERS].release()
            except RuntimeError as error:
                refusal = str(error)
        policy.step()
        if step == NUM_STEPS - 1:
            owned = {owner.value: group.num_bytes() for owner, group in groups.items()}
            caches = num_bytes(storages_of(policy._dispatcher_caches.tensors()))
            _count(sharing, mode, facts)
        if mode is OffloadMode.ALL:
            groups[MemoryOwner.OPTIMIZER].start_release()
            policy.logprobs(batches)
            if step % 2:
                groups[MemoryOwner.OPTIMIZER].restore()
        sharing.leave_all()
        for group in groups.values():
            group.restore()
        policy.platform.wait_for_copies()  # as on the way to training, of parameters
    facts.weights[mode.value] = [p.detach().clone() for p in policy.named_parameters().values()]
    found = reference.logprobs(batches)
    facts.reference[mode.value] = [t for t in found if t is not None]
    return replace(facts, owned=owned, caches=caches, open_gradients=refusal)


def _count(sharing: ColocationPlan, mode: OffloadMode, facts: OffloadFacts) -> None:
    """How much all tensors of the process shrink when the mode's groups leave."""
    host = {
        region.untyped_storage()._cdata
        for group in sharing.groups.values()
        if group._pool is not None
        for region in group._pool._regions.values()
    }
    before = tensor_bytes(host)
    sharing.leave_all()
    facts.freed[mode.value] = before - tensor_bytes(host)
    facts.left.clear()
    facts.left.update({owner.value: g.num_bytes() for owner, g in sharing.groups.items()})
    for group in sharing.groups.values():
        group.restore()
