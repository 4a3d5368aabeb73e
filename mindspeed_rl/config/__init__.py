"""Run configuration: frozen dataclasses, one field per flag."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_rl.algorithms.advantages import AdvantageSettings
from mindspeed_rl.algorithms.correction import CorrectionSettings
from mindspeed_rl.algorithms.distillation import DistillationSettings
from mindspeed_rl.algorithms.lora import LoraSettings
from mindspeed_rl.algorithms.policy_losses import SurrogateSettings
from mindspeed_rl.config.algorithms import (
    AdvantageConfig,
    CriticConfig,
    KLConfig,
    PolicyLossConfig,
    SamplingConfig,
)
from mindspeed_rl.config.benchmark import BenchmarkConfig
from mindspeed_rl.config.diagnostics import AlarmConfig, ProfilerConfig, TrackerConfig
from mindspeed_rl.config.dry_run import DryRunConfig
from mindspeed_rl.config.environment import EnvironmentConfig
from mindspeed_rl.config.kernels import KernelConfig
from mindspeed_rl.config.launch import LaunchConfig
from mindspeed_rl.config.memory import DeviceConfig, MemoryConfig
from mindspeed_rl.config.model import ModelConfig, ParallelConfig
from mindspeed_rl.config.npu import NpuConfig
from mindspeed_rl.config.replay import ReplayConfig
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
from mindspeed_rl.core.agents import AGENT_FLAG, AgentConfig
from mindspeed_rl.core.chat_template import ChatConfig


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
    chat: ChatConfig = field(default_factory=ChatConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    engine: EngineTuningConfig = field(default_factory=EngineTuningConfig)
    drafts: RolloutDraftConfig = field(default_factory=RolloutDraftConfig)
    balance: RolloutBalanceConfig = field(default_factory=RolloutBalanceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    distillation: DistillationSettings = field(default_factory=DistillationSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    dry_run: DryRunConfig = field(default_factory=DryRunConfig)
    ascend: NpuConfig = field(default_factory=NpuConfig)
    trackers: TrackerConfig = field(default_factory=TrackerConfig)
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    engine_options: dict[str, object] = field(default_factory=dict)

    @property
    def has_critic(self) -> bool:
        """Whether advantages need a critic."""
        return self.advantages.estimator.needs_critic

    @property
    def partner(self) -> str:
        """The flag, with its value, of what the policy converses with; empty without turns."""
        if self.agent.rl_agent:
            return f"{AGENT_FLAG} {self.agent.rl_agent}"
        name = self.environment.rl_environment
        return f"--rl-environment {name}" if name else ""

    @property
    def max_turns(self) -> int:
        """Most turns of the model in one response."""
        if self.agent.rl_agent:
            return self.agent.rl_agent_max_turns
        flags = self.environment
        return flags.rl_environment_max_turns if flags.rl_environment else 1

    @property
    def algorithm(self) -> str:
        """What a line of progress calls the run: its preset, or else its estimator."""
        name = self.advantages.rl_advantage_estimator
        return self.rl.rl_preset or ("distillation" if name == "none" else name)

    @property
    def watched_constant_steps(self) -> int:
        """``--reward-constant-steps``, or 0 (never) where rewards are not trained on."""
        trained_on = self.advantages.rl_advantage_estimator != "none"
        return self.rewards.reward_constant_steps if trained_on else 0

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
    chat: ChatConfig = field(default_factory=ChatConfig)
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
