"""Flags of trackers, of alarms and of the profiler, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mindspeed_rl.config.rewards import RewardConfig
from mindspeed_rl.config.training import CheckpointConfig
from mindspeed_rl.core.alarms import FLAG, NAMES, Rule, chosen_rules
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.flag import flag
from mindspeed_rl.core.user_files import check_python_name

PROFILE_FOLDER = "profile"
_LEVELS = ("level0", "level1", "level2")


@dataclass(frozen=True, slots=True)
class Tracker:
    """A module that takes metrics through ``init``, ``log`` and ``finish``.

    Attributes:
        module: Name of the module, or path of a ``.py`` file.
        where: Flag and value that ask for the tracker, for messages.
        name: Name of the run in the tracker; empty: that of the output folder.
        arguments: Arguments of ``init``; ``name``, ``group`` and ``config`` are added.
    """

    module: str
    where: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrackerConfig:
    """Trackers.

    Metrics always go to metrics.jsonl and TensorBoard; naming a project sends them to Weights &
    Biases or SwanLab as well, and naming a file or module to a logger of your own, with the flags
    of the run. Keys, hosts and offline modes are set as their packages have it (``wandb login``,
    ``WANDB_MODE=offline``, ``swanlab login``, ``SWANLAB_MODE=offline``). A resumed run is a run of
    its own there, in the group of the name.

    Example: --wandb-project rl --wandb-exp-name qwen2.5-7b-seed0
    """

    wandb_project: str = flag("", "Weights & Biases project; empty: it is not used.")
    wandb_exp_name: str = flag("", "Name of the run there; empty takes the name of --output-dir.")
    wandb_entity: str = flag("", "Team or user of the project; empty takes the default.")
    wandb_save_dir: str = flag("", "Folder of its local files; empty takes OUTPUT_DIR.")
    swanlab_project: str = flag("", "SwanLab project; empty: it is not used.")
    swanlab_exp_name: str = flag("", "Name of the run there; empty takes the name of --output-dir.")
    swanlab_save_dir: str = flag("", "Folder of its local files; empty takes OUTPUT_DIR/swanlog.")

    tracker: tuple[str, ...] = flag(
        (),
        "Loggers of your own that get the metrics as well: FILE.py, or a module on PYTHONPATH, "
        "with a function init (docs/extending.md).",
        nargs="*",
    )

    def trackers(self, output_dir: str = "") -> tuple[Tracker, ...]:
        """The trackers that were asked for: those of the packages, then the user's own."""
        wandb, swanlab = self.wandb_project, self.swanlab_project
        found = (
            Tracker(
                "wandb",
                f"--wandb-project {wandb}",
                self.wandb_exp_name,
                {
                    "project": wandb,
                    "entity": self.wandb_entity or None,
                    "dir": self.wandb_save_dir or output_dir,
                },
            ),
            Tracker(
                "swanlab",
                f"--swanlab-project {swanlab}",
                self.swanlab_exp_name,
                {
                    "project": swanlab,
                    "log_dir": self.swanlab_save_dir or str(Path(output_dir) / "swanlog"),
                },
            ),
        )
        own = (Tracker(m, f"--tracker {m}", "", {"output_dir": output_dir}) for m in self.tracker)
        return (*(tracker for tracker in found if tracker.arguments["project"]), *own)


@dataclass(frozen=True, slots=True)
class AlarmConfig:
    """Alarms.

    Every step is judged by a table of rules with bounds (docs/alarms.md): numbers that are not
    finite, gradient norms and losses out of range, collapsing entropy, exploding lengths, dead
    rewards, a drifting mismatch. What breaks a rule is told in one line.

    Example, tighter and without mercy: --rl-alarms grad-norm:10=skip entropy-collapse=stop
    """

    rl_alarms: tuple[str, ...] = flag(
        (),
        f"What rules do, each NAME=ACTION or NAME:BOUND=ACTION. Names: {', '.join(NAMES)}. "
        "Actions: off; warn prints a line; skip leaves out the update, where the number is known "
        "before it (nonfinite, grad-norm); rollback goes back to the newest sound checkpoint of "
        "--save and passes over the prompts since then; stop ends the run. Without the flag "
        "nonfinite stops and the others warn.",
        nargs="*",
    )

    @property
    def rules(self) -> dict[str, Rule]:
        """The rules by name.

        Raises:
            UsageError: A value names no rule or action, or what its rule cannot do.
        """
        return chosen_rules(self.rl_alarms)


@dataclass(frozen=True, slots=True)
class ProfilerConfig:
    """Profiler.

    PyTorch's profiler, torch_npu's on NPUs, over a window of steps: all of a step, rollout and
    weight update included. Each rank that is asked for writes one trace, which
    https://ui.perfetto.dev and TensorBoard open; those of torch_npu MindStudio Insight.

    Example, steps 10 and 11: --profile --profile-step-start 10 --profile-step-end 12
    """

    profile: bool = flag(False, "Profile a window of steps.")
    profile_step_start: int = flag(10, "First step that is profiled.", minimum=1)
    profile_step_end: int = flag(12, "First step that is not profiled any more.", minimum=2)
    profile_ranks: tuple[str, ...] = flag(
        ("0",), "Ranks that are profiled; -1 or all: every one.", nargs="*"
    )
    profile_save_path: str = flag(
        "", f"Folder of the traces; empty takes OUTPUT_DIR/{PROFILE_FOLDER}."
    )
    profile_level: str = flag(
        "level0",
        "How much the NPU's profiler records; elsewhere unused.",
        choices=_LEVELS,
    )
    profile_with_stack: bool = flag(False, "Record the Python stack of every operator.")
    profile_with_memory: bool = flag(False, "Record every allocation.")
    profile_record_shapes: bool = flag(False, "Record the shapes of inputs.")

    def asks_for(self, rank: int) -> bool:
        """Whether a rank is profiled."""
        everyone = {"-1", "all"} & set(self.profile_ranks)
        return self.profile and (bool(everyone) or str(rank) in self.profile_ranks)


def check_trackers(config: TrackerConfig) -> None:
    """Refuse a tracker whose file or package is missing. Local; imports nothing.

    Raises:
        UsageError: A file or package is missing, or the file defines no ``init``.
    """
    for tracker in config.trackers():
        if tracker.module.endswith(".py"):
            check_python_name(Path(tracker.module), "init", tracker.where)
            continue
        package = tracker.module.partition(".")[0]
        if not package or find_spec(package) is None:
            fix = (
                f"run pip install {package}"
                if "project" in tracker.arguments
                else "give the path of a .py file, or put the module on PYTHONPATH"
            )
            raise UsageError(
                f"{tracker.where} needs the package {package!r}, which cannot be found; {fix}, or "
                "remove the flag"
            )


def check_alarms(config: AlarmConfig, rewards: RewardConfig, checkpoint: CheckpointConfig) -> None:
    """Refuse rules that do not exist or cannot act.

    Raises:
        UsageError: The message names the flag.
    """
    asked = config.rules["dead-rewards"].action == "stop"
    if asked and not rewards.reward_constant_steps:
        raise UsageError(
            "--rl-alarms dead-rewards=stop: --reward-constant-steps 0 never counts such steps; "
            "give the number of steps after which the run is to stop"
        )
    back = [f"{r.name}=rollback" for r in config.rules.values() if r.action == "rollback"]
    if back and not (checkpoint.save_interval or checkpoint.save_interval_minutes):
        raise UsageError(
            f"{FLAG} {back[0]} goes back to a checkpoint of this run; give --save with "
            "--save-interval or --save-interval-minutes"
        )
    if back and (checkpoint.no_save_optim or checkpoint.no_save_rng):
        left_out = "--no-save-optim" if checkpoint.no_save_optim else "--no-save-rng"
        raise UsageError(
            f"{FLAG} {back[0]} needs whole checkpoints to go back to; remove {left_out}"
        )


def check_profiler(config: ProfilerConfig, world: int) -> None:
    """Refuse windows and ranks that would record nothing.

    Raises:
        UsageError: The message names the flag.
    """
    if not config.profile:
        return
    if config.profile_step_end <= config.profile_step_start:
        raise UsageError(
            f"--profile-step-end {config.profile_step_end} must be above --profile-step-start "
            f"{config.profile_step_start}: it is the first step that is not profiled"
        )
    for text in config.profile_ranks:
        if text in ("-1", "all"):
            continue
        if not text.isdecimal() or int(text) >= world:
            raise UsageError(
                f"--profile-ranks {text}: allowed are 0 to {world - 1}, and -1 or all for every one"
            )
