"""Turns the configuration of a run into that of the replay of one of its steps."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.launch import LaunchConfig
from mindspeed_rl.config.training import CheckpointConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.flag import flag_names

_ONE_START = LaunchConfig()


def as_replay(config: RLRunConfig) -> RLRunConfig:
    """Return the configuration of the replay of a run; the same where none is asked for.

    It keeps everything that the numbers of a step depend on. No pass runs beside engines, where the
    number of passes of a rank would depend on the clock; the numbers are the same.

    Raises:
        UsageError: The flags of the replay are malformed, or do not fit others.
    """
    if not config.replay.active:
        return config
    _check_replay(config)
    prompts = config.prompts
    return replace(
        config,
        rl=replace(
            config.rl,
            old_logprob_pass=_later(config.rl.old_logprob_pass),
            reference_pass=_later(config.rl.reference_pass),
        ),
        checkpoint=_restored(config),
        alarms=replace(
            config.alarms,
            rl_alarms=tuple(a for a in config.alarms.rl_alarms if not a.endswith("=rollback")),
        ),
        launch=replace(
            config.launch,
            max_restarts=0,
            restart_backoff_s=_ONE_START.restart_backoff_s,
            elastic_min_nodes=0,
            elastic_wait_s=_ONE_START.elastic_wait_s,
        ),
        logging=replace(
            config.logging,
            output_dir=str(config.replay.folder),
            overwrite_output_dir=True,
            tensorboard_dir="",
        ),
        prompts=replace(
            prompts,
            eval_prompt_data="",
            rl_eval_data=(),
            eval_interval=0,
            rl_prompts_per_eval=0,
            rl_eval_samples=0,
            rl_eval_temperature=1.0,
            rl_eval_in_rollouts=False,
        ),
        critic=replace(config.critic, critic_export_hf=""),
        trackers=type(config.trackers)(),
    )


def _later(choice: str) -> str:
    """Return the rows of a pass, after the rollout."""
    return "single" if choice == "tail" else choice


def _restored(config: RLRunConfig) -> CheckpointConfig:
    """Return the flags of checkpoints of a replay, which saves nothing.

    The first step starts as that of the run did. Checkpoints of ``--save`` are whole, whatever was
    left out of the one that the run began with.

    Raises:
        UsageError: Nothing says where the checkpoints of the run are, or it has none.
    """
    given = config.checkpoint
    if config.replay.step > 1 and given.save:
        return CheckpointConfig(
            load=given.save, no_load_optim=given.no_save_optim, no_load_rng=given.no_save_rng
        )
    if config.replay.step > 1 and not given.load:
        raise UsageError(
            f"{_typed(config)}: neither --save nor --load says where the checkpoints of the "
            "run are; add the --save of the run"
        )
    if config.replay.step > 1 and given.finetune:
        raise UsageError(
            f"{_typed(config)}: the run counts its own steps from the weights of --load "
            f"{given.load} (--finetune), and without --save there is no checkpoint of them; add "
            "the --save of the run, or replay step 1"
        )
    own = given.save and Path(given.load).resolve() == Path(given.save).resolve()
    return CheckpointConfig(
        load="" if own else given.load,  # it was empty when the run began
        finetune=given.finetune,
        no_load_optim=given.no_load_optim,
        no_load_rng=given.no_load_rng,
    )


def _typed(config: RLRunConfig) -> str:
    return f"--replay {' '.join(config.replay.replay)}"


def _check_replay(config: RLRunConfig) -> None:
    typed, values = _typed(config), config.replay.replay
    if len(values) != 2 or not values[0].isdecimal() or int(values[0]) < 1:
        raise UsageError(
            f"{typed}: give two values, the number of a step, from 1 on, and the --output-dir of "
            "the run that it belongs to"
        )
    last = config.train.train_iters
    if last and config.replay.step > last:  # with --epochs steps are counted later
        raise UsageError(
            f"{typed}: the run ends with step {last} (--train-iters); give a step up to that one"
        )
    for other, given in (
        ("--rl-benchmark-lengths", config.benchmark.active),
        ("--rl-selftest", config.rl.rl_selftest != "none"),
    ):
        if given:
            raise UsageError(f"{typed}: not with {other}, which is no run; remove one of the two")


# Sections that the numbers of a step do not depend on, or that a replay sets itself.
_NOT_RECORDED = (
    *("replay", "checkpoint", "logging", "prompts", "dry_run", "launch", "trackers", "profiler"),
    "benchmark",
)


def recorded_flags(config: RLRunConfig) -> dict[str, str]:
    """Return the flags that are not at their default and may change the numbers of a step."""
    options = config.engine_options.items()
    found = {f"--vllm-{name.replace('_', '-')}": str(value) for name, value in options}
    for section in fields(config):
        flags = getattr(config, section.name)
        if section.name in _NOT_RECORDED or not is_dataclass(flags):
            continue
        for one in fields(flags):
            value = getattr(flags, one.name)
            if value != one.default:
                text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
                found[flag_names(one)[0]] = text
    return found
