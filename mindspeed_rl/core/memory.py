"""Owners of device memory and phases of a step: the names that prediction and measurement share."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class MemoryOwner(enum.StrEnum):
    """The purpose of bytes on a device."""

    PARAMETERS = "parameters"  # of the policy, in the training precision
    GRAD_BUFFERS = "grad_buffers"
    OPTIMIZER = "optimizer"  # main parameters where they are copies, exp_avg, exp_avg_sq
    REFERENCE = "reference"  # parameters of the first policy, for the KL term
    CRITIC = "critic"  # parameters of the critic
    CRITIC_GRAD_BUFFERS = "critic_grad_buffers"
    CRITIC_OPTIMIZER = "critic_optimizer"
    REWARD_MODEL = "reward_model"  # parameters of the reward model
    TEACHERS = "teachers"  # parameters of all teachers
    ACTIVATIONS = "activations"  # kept by forward for backward, and the workspace of both
    LOGITS = "logits"  # of one chunk of tokens and one vocabulary shard, in fp32
    RESHARD_STAGING = "reshard_staging"
    SENT_WEIGHTS = "sent_weights"  # copies that the next update is compared with
    ENGINE_WEIGHTS = "engine_weights"
    DRAFT_MODEL = "draft_model"  # of a host's engine, which keeps it; elsewhere with its weights
    KV_CACHE = "kv_cache"
    SAMPLES = "samples"  # tokens and log-probs of this step's and of carried-over responses
    ENGINE_WORKSPACE = "engine_workspace"  # activations of the largest engine step
    GRAPHS = "graphs"
    SAVE_STAGING = "save_staging"  # copies of what a checkpoint stores; on the host only
    EXPORT_STAGING = "export_staging"  # rows on their way into a Hugging Face checkpoint
    COMMUNICATORS = "communicators"  # buffers of HCCL or NCCL; gloo has none on the device


EXPORT_BUFFER_BYTES = 512 << 20
"""Most memory of a rank's device that an export of a Hugging Face checkpoint takes."""

LOAD_BUFFER_BYTES = 256 << 20
"""Most memory of the host that the rows of checkpoints take while a rank reads them."""

# Only updates of the policy need these; they leave before the engine's weights arrive.
UPDATE_STATE = (MemoryOwner.GRAD_BUFFERS, MemoryOwner.OPTIMIZER)
# Memory of the critic's updates; its parameters alone suffice for its passes.
CRITIC_OWNERS = (MemoryOwner.CRITIC, MemoryOwner.CRITIC_GRAD_BUFFERS, MemoryOwner.CRITIC_OPTIMIZER)
# Models other than the policy. When they are offloaded, they are on the device only for their own
# passes and updates.
OTHER_MODELS = (
    MemoryOwner.REFERENCE,
    MemoryOwner.REWARD_MODEL,
    MemoryOwner.TEACHERS,
    *CRITIC_OWNERS,
)
LEAVING = (*UPDATE_STATE, MemoryOwner.PARAMETERS, *OTHER_MODELS)


class MemoryPhase(enum.StrEnum):
    """The phase in which bytes are counted: the edges of a step, and the peaks between them."""

    LOAD = "load"  # weights just read, optimizer built, engine built and asleep
    TRAIN_IDLE = "train_idle"  # the training phase, before its first micro-batch
    TRAIN = "train"  # the peak of a training step
    SAVE = "save"  # the peak of writing a checkpoint
    EXPORT = "export"  # the peak of writing a Hugging Face checkpoint
    SYNC = "sync"  # the peak of a weight update: both sides and the staging
    ROLLOUT = "rollout"  # the peak of generation


@dataclass(frozen=True, slots=True)
class _Policy:
    """The effects of an offload mode.

    Attributes:
        help: Description of the mode in the help of the flag.
        leaves: Owners that are off the device in the phases of :meth:`OffloadMode.away`.
        frees_engine_weights: Whether the engine's weights are freed while the trainer trains.
    """

    help: str
    leaves: tuple[MemoryOwner, ...] = ()
    frees_engine_weights: bool = False


class OffloadMode(enum.StrEnum):
    """``--rl-offload``: what of the trainer leaves the device while the engine samples.

    To add a mode, give it a name here and a row in ``_POLICIES``: flag, dry run and phases follow
    from it. AUTO tries the other modes in this order.
    """

    AUTO = "auto"
    NONE = "none"
    OPTIMIZER = "optimizer"
    ALL = "all"

    @property
    def help(self) -> str:
        """Description of the mode in the help of the flag."""
        return _POLICIES[self].help

    @property
    def leaves(self) -> frozenset[MemoryOwner]:
        """Owners that are off the device in the phases of :meth:`away`."""
        return frozenset(_POLICIES[self].leaves)

    def away(self, phase: MemoryPhase) -> frozenset[MemoryOwner]:
        """Owners that are off the device in a phase; other models return for their own passes."""
        absent: dict[MemoryPhase, tuple[MemoryOwner, ...]] = {
            MemoryPhase.TRAIN_IDLE: OTHER_MODELS,
            MemoryPhase.TRAIN: OTHER_MODELS,
            MemoryPhase.SYNC: (*OTHER_MODELS, *UPDATE_STATE),
            MemoryPhase.ROLLOUT: LEAVING,
        }
        return self.leaves.intersection(absent.get(phase, ()))

    def sleeps_deeply(self, rollout_sleep: str) -> bool:
        """Whether ``--rollout-sleep`` auto, kv or all frees the engine's weights as well."""
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


def export_bytes(num_parameters: int, bf16: bool) -> int:
    """Return the most bytes of a rank's device that an export takes. Pure.

    All of a small model is sent, received and put together at most once.

    Args:
        num_parameters: Parameters of the model.
        bf16: Whether the model is in bf16; else in fp32.
    """
    return min(EXPORT_BUFFER_BYTES, 3 * num_parameters * (2 if bf16 else 4))
