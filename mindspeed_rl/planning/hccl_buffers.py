"""Decides the sizes of HCCL's buffers in a process, before HCCL is loaded.

``HCCL_BUFFSIZE`` holds for every communicator of a process that has no size of its own, and is the
only way to give the engine's dispatch of experts a larger one. Every communicator holds two
buffers, so the groups of megatron-core, which would grow with it, then get their usual size by
name. The world, whose group exists before, and groups that other code makes grow with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mindspeed_rl.config import RLRunConfig, ScoreRunConfig, TrainingRunConfig
from mindspeed_rl.config.npu import group_buffers
from mindspeed_rl.config.rollout import EngineTuningConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.groups import MEGATRON_GROUPS
from mindspeed_rl.planning.expert_dispatch import dispatch_of
from mindspeed_rl.planning.run_plan import RLPlan, RunPlan, ScorePlan

VARIABLE = "HCCL_BUFFSIZE"
DEFAULT_MB = 200
"""Size of a buffer of HCCL without the variable, in MiB."""
_MIB = 2**20
_Config = TrainingRunConfig | ScoreRunConfig


@dataclass(frozen=True, slots=True)
class HcclBuffers:
    """The sizes of HCCL's buffers, in MiB; a communicator has two.

    Attributes:
        needed_mb: What the dispatch of experts needs; 0: nothing in particular.
        usual_mb: Size of a group for which nothing else is said.
    """

    needed_mb: int
    usual_mb: int

    @property
    def process_mb(self) -> int:
        """Value of the variable in the process."""
        return max(self.usual_mb, self.needed_mb)

    @property
    def raised(self) -> bool:
        """Whether the dispatch of experts needs more than other groups have."""
        return self.process_mb > self.usual_mb

    def line(self) -> str:
        """Describe the sizes, for the log and the dry run; empty where nothing is needed."""
        if not self.needed_mb:
            return ""
        text = (
            f"{VARIABLE} {self.process_mb} MiB: the engine's dispatch of experts needs "
            f"{self.needed_mb} MiB"
        )
        if self.raised:
            text += f"; groups of the trainer keep {self.usual_mb} MiB, by --hccl-group-buffer"
        return text


def needed_mb(config: _Config, plan: RunPlan, machine: str) -> int:
    """Return the MiB of a buffer that the dispatch of experts needs on a machine; 0: none. Local.

    Args:
        config: Configuration of the run.
        plan: Plan of the run.
        machine: Name of the machine; other operators choose other formulas.
    """
    if not isinstance(plan, RLPlan | ScorePlan) or not isinstance(
        config, RLRunConfig | ScoreRunConfig
    ):
        return 0
    tuning = config.engine if isinstance(config, RLRunConfig) else EngineTuningConfig()
    dispatch = dispatch_of(plan.rollout_layout, config.engine_options, tuning)
    return -(-dispatch.buffer_bytes(machine) // _MIB) if dispatch else 0


def hccl_buffers(
    config: _Config, plan: RunPlan, machine: str, environ: Mapping[str, str]
) -> HcclBuffers:
    """Size the buffers of a run on NPUs. Local.

    Args:
        config: Configuration of the run.
        plan: Plan of the run.
        machine: Name of the machine.
        environ: Environment of the run; a value of the user's wins.

    Raises:
        UsageError: The user's value is no size, or less than what the run needs.
    """
    needed, given = needed_mb(config, plan, machine), environ.get(VARIABLE)
    if given is None:
        return HcclBuffers(needed, DEFAULT_MB)
    if not given.isdecimal() or not int(given):
        raise UsageError(
            f"{VARIABLE}={given}: a whole number of MiB is needed; unset it, or export "
            f"{VARIABLE}={max(DEFAULT_MB, needed)}"
        )
    if int(given) < needed:
        raise UsageError(
            f"{VARIABLE}={given}: the engine's dispatch of experts needs {needed} MiB; unset it, "
            f"export {VARIABLE}={needed}, or lower --vllm-max-num-seqs"
        )
    return HcclBuffers(needed, int(given))


def with_group_sizes(config: _Config, buffers: HcclBuffers) -> _Config:
    """Return the configuration with a size for every group of megatron-core, if others grow."""
    if not buffers.raised:
        return config
    own = group_buffers(config.ascend.hccl_group_buffer)
    sizes = {name: own.get(name, buffers.usual_mb) for name in MEGATRON_GROUPS}
    text = ";".join(f"{name}:{size}" for name, size in sizes.items())
    return replace(config, ascend=replace(config.ascend, hccl_group_buffer=text))
