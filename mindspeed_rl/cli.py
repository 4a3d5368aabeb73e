"""The console script ``mindspeed-rl``: one name for the commands, which are modules as well.

usage: mindspeed-rl COMMAND [flags]        mindspeed-rl COMMAND --help

  train     RL: rollouts, rewards, updates          python -m mindspeed_rl.train_rl
  plan      memory and seconds of a run, beforehand python -m mindspeed_rl.train_rl --rl-dry-run
  pretrain  supervised training                     python -m mindspeed_rl.pretrain
  score     log-probs of given tokens               python -m mindspeed_rl.score
  convert   checkpoints of other formats            python -m mindspeed_rl.convert
  rollouts  responses of a run, in a browser        python -m mindspeed_rl.metrics.rollouts_page
  doctor    can a run start on this machine?        python -m mindspeed_rl.doctor
  recipes   launch scripts and tools, as files      python -m mindspeed_rl.command_line.recipes

A command alone is a job of one rank. For eight ranks:
  torchrun --nproc-per-node 8 --no-python mindspeed-rl train [flags]
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_rl.launch.failures import USAGE_ERROR


@dataclass(frozen=True, slots=True)
class ConsoleCommand:
    """A command: the module that it runs, and flags that it adds."""

    module: str
    flags: tuple[str, ...] = ()


COMMANDS: Mapping[str, ConsoleCommand] = {
    "train": ConsoleCommand("mindspeed_rl.train_rl"),
    "plan": ConsoleCommand("mindspeed_rl.train_rl", ("--rl-dry-run",)),
    "pretrain": ConsoleCommand("mindspeed_rl.pretrain"),
    "score": ConsoleCommand("mindspeed_rl.score"),
    "convert": ConsoleCommand("mindspeed_rl.convert"),
    "rollouts": ConsoleCommand("mindspeed_rl.metrics.rollouts_page"),
    "doctor": ConsoleCommand("mindspeed_rl.doctor"),
    "recipes": ConsoleCommand("mindspeed_rl.command_line.recipes"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command as if its module had been started. Ends the process as the module does."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    name, flags = arguments[0] if arguments else "", arguments[1:]
    if name in ("-h", "--help"):
        print(__doc__)
        return
    if name not in COMMANDS:
        print(
            f"mindspeed-rl: error: {f'no command {name!r}' if name else 'no command'}; give one of "
            f"{', '.join(COMMANDS)}, or --help",
            file=sys.stderr,
        )
        sys.exit(USAGE_ERROR)
    command = COMMANDS[name]
    sys.argv = [command.module, *command.flags, *flags]
    runpy.run_module(command.module, run_name="__main__", alter_sys=True)
