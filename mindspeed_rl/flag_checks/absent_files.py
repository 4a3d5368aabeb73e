"""Files of a command line that this machine does not have: a dry run says so and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.reward_spec import RewardSpec
from mindspeed_rl.config.rl import eval_flag
from mindspeed_rl.core.agents import AGENT_FLAG
from mindspeed_rl.core.data_source import DataSource
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.redaction import redacted_text


def absent_files(config: RLRunConfig | PretrainRunConfig) -> list[str]:
    """Return a line for each data set and each Python file that is not on this machine. Local.

    Names of the hub are no files. Without these lines "fits" would hide a path that is wrong; a
    dry run on another machine than that of the run is as good without them.
    """
    absent = [f"{flag} {text}" for flag, text in _data(config) if text and not _has_data(text)]
    if isinstance(config, RLRunConfig):
        for flag, name in _python_names(config):
            path, separator, _ = name.rpartition(":")
            if separator and not Path(path).is_file():
                absent.append(f"{flag} {name}")
    return [f"note: {redacted_text(what)} is not on this machine" for what in dict.fromkeys(absent)]


def _data(config: RLRunConfig | PretrainRunConfig) -> Iterator[tuple[str, str]]:
    if isinstance(config, PretrainRunConfig):
        yield "--sft-data", config.sft.sft_data
        return
    if not config.benchmark.active:
        for text in config.prompts.blend.prefixes:
            yield "--prompt-data", text
    for name, text in config.prompts.eval_files.items():
        yield eval_flag(name), text


def _has_data(text: str) -> bool:
    """Whether a data set is here, or on the hub."""
    try:
        DataSource.parse(text, "")
    except UsageError:
        return Path(text).exists()  # else the run says what is wrong with it
    return True


def _python_names(config: RLRunConfig) -> Iterator[tuple[str, str]]:
    for text in config.rewards.reward_function:
        yield "--reward-function", RewardSpec.parse(text).name
    yield "--rl-environment", config.environment.rl_environment
    yield AGENT_FLAG, config.agent.rl_agent
