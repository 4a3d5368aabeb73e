"""Run configuration: frozen dataclasses, one field per flag (layer 0)."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_rl.config.model import ModelConfig, ParallelConfig
from mindspeed_rl.config.rl import PromptConfig, RewardConfig, RLConfig, RolloutConfig
from mindspeed_rl.config.sft import SftConfig
from mindspeed_rl.config.training import CheckpointConfig, LoggingConfig, TrainConfig

__all__ = [
    "CheckpointConfig",
    "LoggingConfig",
    "ModelConfig",
    "ParallelConfig",
    "PretrainRunConfig",
    "PromptConfig",
    "RLConfig",
    "RLRunConfig",
    "RewardConfig",
    "RolloutConfig",
    "SftConfig",
    "TrainConfig",
]


@dataclass(frozen=True, slots=True)
class RLRunConfig:
    """Everything that ``mindspeed_rl.train_rl`` reads."""

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    prompts: PromptConfig
    rl: RLConfig
    rollout: RolloutConfig
    rewards: RewardConfig
    vllm_options: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PretrainRunConfig:
    """Everything that ``mindspeed_rl.pretrain`` reads."""

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    sft: SftConfig
