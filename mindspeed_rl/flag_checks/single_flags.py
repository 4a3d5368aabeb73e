"""Checks of flags that need neither the model nor the layout: data, lengths of runs, files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mindspeed_rl.config import ModelConfig, PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.diagnostics import check_alarms, check_profiler, check_trackers
from mindspeed_rl.config.environment import BUILT_IN_ENVIRONMENTS
from mindspeed_rl.config.outputs import check_paths
from mindspeed_rl.config.reward_spec import check_name
from mindspeed_rl.config.rewards import check_rewards
from mindspeed_rl.config.rl import eval_flag
from mindspeed_rl.config.supervised import check_indexed_data
from mindspeed_rl.config.training import TrainConfig
from mindspeed_rl.core.agents import AGENT_FLAG
from mindspeed_rl.core.data_source import ALLOWED, DataSource
from mindspeed_rl.core.errors import UsageError, check_each, refuse
from mindspeed_rl.flag_checks.algorithms import check_algorithms


def check_rl_flags(config: RLRunConfig, world: int, *, files: bool) -> None:
    """Check what flags alone say, and with ``files`` the files that they name. Local.

    Raises:
        UsageError: Flags are wrong; it has what every check has found.
    """
    rewards = partial(
        check_rewards, config.rewards, config.logging.phase_limit_s, config.partner, files=files
    )
    checks: list[Callable[[], object]] = [
        partial(check_algorithms, config),
        partial(_check_truncation, config),
        partial(check_alarms, config.alarms, config.rewards, config.checkpoint),
        partial(check_profiler, config.profiler, world),
        partial(_check_dropout, config.model),
        partial(check_steps, config.train, config.prompts.epochs, rl=True),
        partial(config.chat.check, config.prompts.apply_chat_template),
        rewards,
    ]
    if files:
        checks += [partial(_check_prompt_files, config), partial(check_paths, config)]
        checks += [partial(check_trackers, config.trackers)]
    if environment := config.environment.rl_environment:
        known = BUILT_IN_ENVIRONMENTS
        checks.append(partial(check_name, "--rl-environment", environment, known, files=files))
    if ":" in (agent := config.agent.rl_agent):  # else its partner's check refuses it
        checks.append(partial(check_name, AGENT_FLAG, agent, (), files=files))
    check_each(*checks)


def check_supervised_flags(config: PretrainRunConfig, world: int, *, files: bool) -> None:
    """Check what flags alone say, and with ``files`` the files that they name. Local.

    Raises:
        UsageError: Flags are wrong; it has what every check has found.
    """
    checks: list[Callable[[], object]] = [
        partial(config.chat.check, config.sft.apply_chat_template),
        partial(check_steps, config.train),
        partial(check_profiler, config.profiler, world),
    ]
    if files and config.sft.stage == "pretrain":
        checks.append(partial(check_indexed_data, config.indexed, config.train.seq_length))
    elif files:
        checks.append(partial(_check_sft_data, config))
    if files:
        checks += [partial(check_paths, config), partial(check_trackers, config.trackers)]
    check_each(*checks)


def _check_prompt_files(config: RLRunConfig) -> None:
    prompts = config.prompts
    training = () if config.benchmark.active else prompts.blend.prefixes or ("",)
    sets = [("--prompt-data", text) for text in training]
    sets += [(eval_flag(name), text) for name, text in prompts.eval_files.items()]
    check_each(*(partial(_need_data, flag, text) for flag, text in sets))


def _check_sft_data(config: PretrainRunConfig) -> None:
    if config.indexed.data_path and not config.sft.sft_data:
        raise UsageError(
            "--data-path without --stage pretrain: with --stage sft the data is --sft-data; add "
            "one of the two"
        )
    _need_data("--sft-data", config.sft.sft_data)


def _need_data(name: str, value: str) -> None:
    if not value:
        raise UsageError(f"{name} is required: give {ALLOWED}")
    DataSource.parse(value, name)


def need_file(name: str, value: str, kind: str) -> None:
    """Refuse a file that is not named or not there.

    Raises:
        UsageError: The message names the flag, the path and the ``kind`` of file.
    """
    if not value:
        raise UsageError(f"{name} is required: give {kind}")
    if not Path(value).is_file():
        raise UsageError(f"{name} {value}: no such file; give {kind}")


def check_steps(train: TrainConfig, epochs: float = 0.0, *, rl: bool = False) -> None:
    """Check that a run has a number of steps, and only one.

    Raises:
        UsageError: There is none, or two.
    """
    if epochs and train.train_iters:
        raise UsageError(
            f"--epochs {epochs:g} and --train-iters {train.train_iters} exclude each other; give "
            "one of them"
        )
    if train.train_iters < 1 and not epochs:
        raise UsageError(
            "--train-iters is required: give the number of steps, at least 1"
            + (", or --epochs" if rl else "")
        )


def _check_truncation(config: RLRunConfig) -> None:
    """Refuse sampling flags that change the distribution which the loss assumes."""
    rl = config.rl
    refuse(
        f"{name} {value:g}: truncated sampling renormalises the engine's log-probs and biases the "
        f"update; allowed: {off}; remove the flag"
        for name, value, off in (
            ("--rl-default-top-p", rl.rl_default_top_p, 1),
            ("--rl-default-top-k", rl.rl_default_top_k, -1),
        )
        if value not in (0, off)
    )


def _check_dropout(model: ModelConfig) -> None:
    """Refuse dropout in RL, because the engine samples without dropout."""
    refuse(
        f"{name} {rate:g}: RL allows 0 only; the engine samples without dropout, so the ratio and "
        "the trainer/engine mismatch would measure dropout instead of learning; remove the flag"
        for name, rate in (
            ("--hidden-dropout", model.hidden_dropout),
            ("--attention-dropout", model.attention_dropout),
        )
        if rate
    )
