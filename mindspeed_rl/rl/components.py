"""The parts of an RL run on one rank, and the state that changes from step to step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mindspeed_rl.building.models import Models
from mindspeed_rl.checkpoint.background import BackgroundWriter
from mindspeed_rl.checkpoint.save_clock import SaveClock
from mindspeed_rl.colocation.memory_ledger import MemoryLedger
from mindspeed_rl.colocation.scheduler import DeviceScheduler
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.alarms import GradientWatch
from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.data.sampler import ByLength, PromptSampler
from mindspeed_rl.generation.rollout_worker import RolloutWorker, TailWork
from mindspeed_rl.launch.job import Job
from mindspeed_rl.metrics.jsonl import JsonlWriter
from mindspeed_rl.metrics.loggers import RunLogger
from mindspeed_rl.metrics.profiler import StepProfiler
from mindspeed_rl.metrics.telemetry import named_phase
from mindspeed_rl.metrics.timers import PhaseTimer
from mindspeed_rl.peers.copies import PeerCopies
from mindspeed_rl.planning.run_plan import RLPlan
from mindspeed_rl.samples.lengths import LengthHistory
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.samples.shown_tokens import ShownTokens
from mindspeed_rl.samples.store import SampleStore
from mindspeed_rl.weight_layouts.rollout import Slots
from mindspeed_rl.weights.sync import WeightSync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptData:
    """The prompts of a run.

    Attributes:
        held_out: Sets to evaluate on, by name; the set of ``--eval-prompt-data`` has the name "".
    """

    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    held_out: dict[str, PromptDataset]


@dataclass(frozen=True)
class Telemetry:
    """Everything that observes the run or writes its results."""

    timer: PhaseTimer
    profiler: StepProfiler
    ledger: MemoryLedger
    logger: RunLogger
    dump: JsonlWriter  # of rollouts; rank 0 writes
    evaluations: JsonlWriter  # of their responses; rank 0 writes
    tokens: ShownTokens = field(default_factory=ShownTokens)

    def close(self) -> None:
        """Write pending output and close the files."""
        self.profiler.close()
        self.logger.close()
        self.dump.close()
        self.evaluations.close()


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
    writer: BackgroundWriter | None = None  # of checkpoints; without it saves are written at once
    save_clock: SaveClock = field(default_factory=SaveClock)
    peers: PeerCopies | None = None  # copies of the state in memory, with --peer-checkpoint-steps
    #: Passes while the last responses are generated; ``None``: there are none.
    tail: TailWork | None = None

    @property
    def config(self) -> RLRunConfig:
        return self.job.config

    @property
    def plan(self) -> RLPlan:
        return self.job.plan

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the parts of a reward: the reward functions and the reward model."""
        model = () if self.models.reward_model is None else ("reward_model",)
        return (*self.rollouts.rewards.names, *model)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Run the body as the named phase of the timer and the watchdog."""
        return named_phase(self.telemetry.timer, self.job.watchdog, name)

    def close(self) -> None:
        """Stop reward workers and environments, and close files."""
        self.rollouts.close()
        self.telemetry.close()


@dataclass
class RunState:
    """What changes from step to step; equal on all ranks, and part of a checkpoint.

    Attributes:
        sampler: Decides which prompts come next.
        step: Number of the present step; 0 before the first.
        version: Number of optimizer updates of the policy, which names its weights.
        kl_beta: Present coefficient of the KL to the reference.
        carried_groups: Groups that dynamic sampling accepted beyond the need of their step.
        partial_groups: Groups with responses that the next step continues.
        lengths: Lengths of earlier responses, by prompt.
        gradients: Gradient norms of earlier updates of the policy.
        rollbacks: Steps whose checkpoints the run went back to at an alarm, in order.
        layer_experts: Layer and the expert in each slot of the engine, after experts were moved to
            balance ranks; empty: as the plan has them.
    """

    sampler: PromptSampler
    step: int = 0
    version: int = 0
    kl_beta: float = 0.0
    carried_groups: list[Sequence[RolloutInfo]] = field(default_factory=list)
    partial_groups: list[Sequence[RolloutInfo]] = field(default_factory=list)
    lengths: LengthHistory = field(default_factory=LengthHistory)
    gradients: GradientWatch = field(default_factory=GradientWatch)
    rollbacks: tuple[int, ...] = ()
    layer_experts: tuple[tuple[int, Slots], ...] = ()

    @classmethod
    def at_start(cls, config: RLRunConfig, prompts: PromptDataset) -> RunState:
        """Return the state of a run that has done no step on ``prompts``."""
        lengths, by_length = LengthHistory(), None
        if config.balance.prompt_order == "by-length":
            # A step with surplus prompts draws more, where it needs all of a step's groups.
            block = math.ceil(config.rl.grpo_prompts_per_step * config.sampling.rl_resample_factor)
            limit = config.rollout.rollout_max_response_length
            by_length = ByLength(block, lambda: lengths.expected_lengths(len(prompts), limit))
        sampler = PromptSampler(
            len(prompts), config.train.seed, fingerprint=prompts.fingerprint, by_length=by_length
        )
        return cls(sampler, kl_beta=config.rl.grpo_kl_beta, lengths=lengths)
