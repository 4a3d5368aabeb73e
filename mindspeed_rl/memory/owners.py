"""Who owns device memory, and when: the names that prediction and measurement share (layer 0)."""

from __future__ import annotations

import enum


class Owner(enum.StrEnum):
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
UPDATE_STATE = (Owner.GRAD_BUFFERS, Owner.OPTIMIZER)
# Memory of the critic's updates; its parameters alone suffice for its passes.
CRITIC_OWNERS = (Owner.CRITIC, Owner.CRITIC_GRAD_BUFFERS, Owner.CRITIC_OPTIMIZER)
# Other models. What of them leaves comes for their own passes and updates only.
VISITORS = (Owner.REFERENCE, Owner.REWARD_MODEL, *CRITIC_OWNERS)
LEAVING = (*UPDATE_STATE, Owner.PARAMETERS, *VISITORS)


class MemoryPhase(enum.StrEnum):
    """When bytes are counted: the edges of a step, and the peaks between them."""

    LOAD = "load"  # weights just read, optimizer built, engine built and asleep
    TRAIN_IDLE = "train_idle"  # the trainer's turn, before its first micro-batch
    TRAIN = "train"  # the peak of a training step
    SYNC = "sync"  # the peak of a weight update: both sides and the staging
    ROLLOUT = "rollout"  # the peak of generation


class OffloadMode(enum.StrEnum):
    """``--rl-offload``: what of the trainer leaves the device while the engine samples."""

    AUTO = "auto"  # the least that fits
    NONE = "none"
    OPTIMIZER = "optimizer"  # gradient buffers and optimizer state, of policy and critic
    ALL = "all"  # and parameters: the policy's once they are resharded, those of all other models

    def leave(self) -> frozenset[Owner]:
        """The owners that leave; of the trainer only."""
        assert self is not OffloadMode.AUTO, "auto is resolved first"
        if self is OffloadMode.ALL:
            return frozenset(LEAVING)
        state = (*UPDATE_STATE, Owner.CRITIC_GRAD_BUFFERS, Owner.CRITIC_OPTIMIZER)
        return frozenset(state if self is OffloadMode.OPTIMIZER else ())
