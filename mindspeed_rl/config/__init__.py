"""Run configuration: frozen dataclasses, one field per flag."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_rl.algorithms.advantages import AdvantageSettings
from mindspeed_rl.algorithms.correction import CorrectionSettings
from mindspeed_rl.algorithms.policy_losses import SurrogateSettings
from mindspeed_rl.config.algorithms import (
    AdvantageConfig,
    CriticConfig,
    KLConfig,
    PolicyLossConfig,
    SamplingConfig,
)
from mindspeed_rl.config.benchmark import BenchmarkConfig
from mindspeed_rl.config.diagnostics import ProfilerConfig, TrackerConfig
from mindspeed_rl.config.dry_run import DryRunConfig
from mindspeed_rl.config.environment import EnvironmentConfig
from mindspeed_rl.config.kernels import KernelConfig
from mindspeed_rl.config.launch import LaunchConfig
from mindspeed_rl.config.memory import DeviceConfig, MemoryConfig
from mindspeed_rl.config.model import ModelConfig, ParallelConfig
from mindspeed_rl.config.npu import NpuConfig
from mindspeed_rl.config.rewards import RewardConfig
from mindspeed_rl.config.rl import PromptConfig, RLConfig
from mindspeed_rl.config.rollout import (
    EngineTuningConfig,
    RolloutBalanceConfig,
    RolloutConfig,
    RolloutDraftConfig,
)
from mindspeed_rl.config.score import ScoreConfig
from mindspeed_rl.config.supervised import IndexedDataConfig, SftConfig
from mindspeed_rl.config.training import CheckpointConfig, LoggingConfig, TrainConfig


@dataclass(frozen=True, slots=True)
class RLRunConfig:
    """Reinforcement learning of a Hugging Face model with verifiable rewards.

    megatron-core trains and vLLM samples, in the same processes and on the same devices.
    Flags have Megatron-LM's names where the meaning is the same.
    """

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    prompts: PromptConfig
    rl: RLConfig
    advantages: AdvantageConfig
    estimation: AdvantageSettings
    policy_loss: PolicyLossConfig
    surrogate: SurrogateSettings
    kl: KLConfig
    correction: CorrectionSettings
    sampling: SamplingConfig
    rollout: RolloutConfig
    memory: MemoryConfig
    rewards: RewardConfig
    kernels: KernelConfig = field(default_factory=KernelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    engine: EngineTuningConfig = field(default_factory=EngineTuningConfig)
    drafts: RolloutDraftConfig = field(default_factory=RolloutDraftConfig)
    balance: RolloutBalanceConfig = field(default_factory=RolloutBalanceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    dry_run: DryRunConfig = field(default_factory=DryRunConfig)
    ascend: NpuConfig = field(default_factory=NpuConfig)
    trackers: TrackerConfig = field(default_factory=TrackerConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    engine_options: dict[str, object] = field(default_factory=dict)

    @property
    def has_critic(self) -> bool:
        """Whether advantages need a critic."""
        return self.advantages.estimator.needs_critic

    @property
    def rewards_in_ray(self) -> bool:
        """Whether rewards run in Ray actors."""
        pool = self.rewards.reward_pool
        return pool == "ray" or (pool == "auto" and self.launch.orchestrator == "ray")


@dataclass(frozen=True, slots=True)
class PretrainRunConfig:
    """Supervised training of a Hugging Face model, for a warm start before RL.

    It runs on the training engine of the RL entry and reads the same flags.
    """

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    sft: SftConfig
    indexed: IndexedDataConfig
    kernels: KernelConfig = field(default_factory=KernelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    dry_run: DryRunConfig = field(default_factory=DryRunConfig)
    ascend: NpuConfig = field(default_factory=NpuConfig)
    trackers: TrackerConfig = field(default_factory=TrackerConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)


@dataclass(frozen=True, slots=True)
class ScoreRunConfig:
    """Log-probs of given sequences by the trainer or the engine, to compare layouts and engines.

    It reads the layout flags of the RL entry.
    """

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    logging: LoggingConfig
    score: ScoreConfig
    rollout: RolloutConfig
    kernels: KernelConfig = field(default_factory=KernelConfig)
    ascend: NpuConfig = field(default_factory=NpuConfig)
    engine_options: dict[str, object] = field(default_factory=dict)


TrainingRunConfig = RLRunConfig | PretrainRunConfig
"""The configuration of a run that trains a model."""
