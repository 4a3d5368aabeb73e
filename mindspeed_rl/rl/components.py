"""What an RL run consists of on one rank: parts that never change, and the little that does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mindspeed_rl.colocation.memory_ledger import MemoryLedger
from mindspeed_rl.colocation.scheduler import DeviceScheduler
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.data.sampler import PromptSampler
from mindspeed_rl.launch.job import Job
from mindspeed_rl.metrics.loggers import RunLogger
from mindspeed_rl.metrics.profiler import StepProfiler
from mindspeed_rl.metrics.rollout_dump import RolloutDump
from mindspeed_rl.metrics.timers import PhaseTimer
from mindspeed_rl.planning.run_plan import RLPlan
from mindspeed_rl.rl.rollout_worker import RolloutWorker
from mindspeed_rl.samples.lengths import LengthHistory
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.samples.store import SampleStore
from mindspeed_rl.trainer.train_engine import TrainEngine
from mindspeed_rl.weights.sync import WeightSync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Models:
    """The models that megatron-core runs; ``None`` where the run has none of the kind."""

    policy: TrainEngine
    reference: TrainEngine | None = None
    critic: TrainEngine | None = None
    reward_model: TrainEngine | None = None


@dataclass(frozen=True)
class PromptData:
    """Where prompts come from.

    Attributes:
        tokenizer: of the run.
        train: prompts to train on.
        held_out: sets to evaluate on by name; that of ``--eval-prompt-data`` is empty.
        sampler: deals out the prompts of ``train``.
    """

    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    held_out: dict[str, PromptDataset]
    sampler: PromptSampler


@dataclass(frozen=True)
class Telemetry:
    """What watches the run and where it is written."""

    timer: PhaseTimer
    profiler: StepProfiler
    ledger: MemoryLedger
    logger: RunLogger
    dump: RolloutDump

    def close(self) -> None:
        """Write what is pending and close files."""
        self.profiler.close()
        self.logger.close()
        self.dump.close()


@dataclass(frozen=True)
class Components:
    """The parts of an RL run on this rank; none of them is replaced while it runs."""

    job: Job[RLRunConfig, RLPlan]
    data: PromptData
    models: Models
    rollouts: RolloutWorker
    samples: SampleStore
    scheduler: DeviceScheduler
    weight_sync: WeightSync
    telemetry: Telemetry

    @property
    def config(self) -> RLRunConfig:
        """The flags."""
        return self.job.config

    @property
    def plan(self) -> RLPlan:
        """Layouts and batch arithmetic."""
        return self.job.plan

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the parts of a reward: the functions', and the reward model's."""
        model = () if self.models.reward_model is None else ("reward_model",)
        return (*self.rollouts.reward_names, *model)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a phase for the timer and the watchdog."""
        with self.telemetry.timer(name), self.job.watchdog.phase(name):
            yield

    def close(self) -> None:
        """Stop reward workers and environments, and close files."""
        self.rollouts.close()
        self.telemetry.close()


@dataclass
class RunState:
    """What changes from step to step; equal on all ranks, and part of a checkpoint.

    Attributes:
        version: optimizer updates of the policy: it names the weights that sampled a token.
        kl_beta: present coefficient of the KL to the reference.
        carried_groups: groups that dynamic sampling accepted beyond the need of their step.
        partial_groups: groups with responses that go on in the next step.
        lengths: of earlier responses, by prompt.
    """

    version: int = 0
    kl_beta: float = 0.0
    carried_groups: list[Sequence[RolloutInfo]] = field(default_factory=list)
    partial_groups: list[Sequence[RolloutInfo]] = field(default_factory=list)
    lengths: LengthHistory = field(default_factory=LengthHistory)
