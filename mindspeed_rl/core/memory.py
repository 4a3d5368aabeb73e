"""Who owns device memory, and when: the names that prediction and measurement share."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class MemoryOwner(enum.StrEnum):
    """What bytes on a device are for."""

    PARAMETERS = "parameters"  # of the policy, in the training precision
    GRAD_BUFFERS = "grad_buffers"
    OPTIMIZER = "optimizer"  # main parameters where they are copies, exp_avg, exp_avg_sq
    REFERENCE = "reference"  # parameters of the first policy, for the KL term
    CRITIC = "critic"  # its parameters
    CRITIC_GRAD_BUFFERS = "critic_grad_buffers"
    CRITIC_OPTIMIZER = "critic_optimizer"
    REWARD_MODEL = "reward_model"  # its parameters
    ACTIVATIONS = "activations"  # what forward keeps for backward, and what both work with
    LOGITS = "logits"  # of the tokens of one chunk and their vocabulary shard, in fp32
    RESHARD_STAGING = "reshard_staging"
    ENGINE_WEIGHTS = "engine_weights"
    KV_CACHE = "kv_cache"
    SAMPLES = "samples"  # tokens and log-probs of this step's and of carried-over responses
    ENGINE_WORKSPACE = "engine_workspace"  # activations of the largest engine step
    GRAPHS = "graphs"
    COMMUNICATORS = "communicators"  # buffers of HCCL or NCCL; gloo has none on the device


# What only updates of the policy need: it leaves before the engine's weights come.
UPDATE_STATE = (MemoryOwner.GRAD_BUFFERS, MemoryOwner.OPTIMIZER)
# Memory of the critic's updates; its parameters alone suffice for its passes.
CRITIC_OWNERS = (MemoryOwner.CRITIC, MemoryOwner.CRITIC_GRAD_BUFFERS, MemoryOwner.CRITIC_OPTIMIZER)
# Other models. What of them leaves comes for their own passes and updates only.
VISITORS = (MemoryOwner.REFERENCE, MemoryOwner.REWARD_MODEL, *CRITIC_OWNERS)
LEAVING = (*UPDATE_STATE, MemoryOwner.PARAMETERS, *VISITORS)


class MemoryPhase(enum.StrEnum):
    """When bytes are counted: the edges of a step, and the peaks between them."""

    LOAD = "load"  # weights just read, optimizer built, engine built and asleep
    TRAIN_IDLE = "train_idle"  # the trainer's turn, before its first micro-batch
    TRAIN = "train"  # the peak of a training step
    SYNC = "sync"  # the peak of a weight update: both sides and the staging
    ROLLOUT = "rollout"  # the peak of generation


@dataclass(frozen=True, slots=True)
class _Policy:
    """An offload mode.

    Attributes:
        help: in the text of the flag.
        leaves: owners that are away in the phases of :meth:`OffloadMode.away`.
        frees_engine_weights: the engine's weights leave while the trainer trains.
    """

    help: str
    leaves: tuple[MemoryOwner, ...] = ()
    frees_engine_weights: bool = False


class OffloadMode(enum.StrEnum):
    """``--rl-offload``: what of the trainer leaves the device while the engine samples.

    A further mode is a name here and its row in the table below: flag, dry run and phases follow
    from it. AUTO tries the others in this order.
    """

    AUTO = "auto"
    NONE = "none"
    OPTIMIZER = "optimizer"
    ALL = "all"

    @property
    def help(self) -> str:
        """What it does, in the text of the flag."""
        return _POLICIES[self].help

    @property
    def leaves(self) -> frozenset[MemoryOwner]:
        """Owners that are away in the phases of :meth:`away`."""
        return frozenset(_POLICIES[self].leaves)

    def away(self, phase: MemoryPhase) -> frozenset[MemoryOwner]:
        """Owners that are not on the device in a phase; VISITORS come for their own passes."""
        absent: dict[MemoryPhase, tuple[MemoryOwner, ...]] = {
            MemoryPhase.TRAIN_IDLE: VISITORS,
            MemoryPhase.TRAIN: VISITORS,
            MemoryPhase.SYNC: (*VISITORS, *UPDATE_STATE),
            MemoryPhase.ROLLOUT: LEAVING,
        }
        return self.leaves.intersection(absent.get(phase, ()))

    def sleeps_deeply(self, rollout_sleep: str) -> bool:
        """Whether the engine's weights leave, too, under ``--rollout-sleep`` auto, kv or all."""
        return rollout_sleep == "all" or (
            rollout_sleep == "auto" and _POLICIES[self].frees_engine_weights
        )


_POLICIES = {
    OffloadMode.AUTO: _Policy(
        "the least with which the predicted peak fits --device-memory-gb, none where the device is "
        "the host"
    ),
    OffloadMode.NONE: _Policy("nothing"),
    OffloadMode.OPTIMIZER: _Policy(
        "gradient buffers and optimizer state",
        (*UPDATE_STATE, MemoryOwner.CRITIC_GRAD_BUFFERS, MemoryOwner.CRITIC_OPTIMIZER),
    ),
    OffloadMode.ALL: _Policy("parameters and all other models, too", LEAVING, True),
}
FIXED_MODES = tuple(mode for mode in OffloadMode if mode is not OffloadMode.AUTO)
