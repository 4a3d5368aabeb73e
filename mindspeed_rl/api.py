"""The command line from Python: ``RLTrainer(...).train()`` for notebooks, scripts and tests.

A run is the command ``mindspeed_rl.train_rl`` with the same flags and the same results, in
processes of its own, so that a notebook may start several and keeps none of their memory. Under
torchrun each calling process starts its rank.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.outputs import METRICS_FILE, ROLLOUTS_FILE, SUMMARY_FILE
from mindspeed_rl.core.files import write_text_atomic

_ENTRY = "mindspeed_rl.train_rl"
_LAST_LINES = 15  # of a run that failed, for the error
_STOP_S = 30.0  # that a run has to end after an interrupt

Rows = Iterable[Mapping[str, Any]]
Flags = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run left behind.

    Attributes:
        output_dir: Folder with everything that the run wrote.
        summary: Numbers before and after the run, see ``summary.json``; empty on ranks whose node
            does not see the folder.
    """

    output_dir: Path
    summary: Mapping[str, Any]

    @property
    def model(self) -> Path | None:
        """Directory of the trained model; ``None`` where ``--export-hf`` asked for none."""
        exported = self.summary.get("hf_checkpoint")
        return Path(exported) if exported else None

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of all steps and evaluations, in the order of the run."""
        return _rows(self.output_dir / METRICS_FILE)

    def rollouts(self) -> list[dict[str, Any]]:
        """Return the samples that the run kept (``--log-rollouts``), with their rewards."""
        return _rows(self.output_dir / ROLLOUTS_FILE)


class RLTrainer:
    """A run of RL that is described in Python.

    Args:
        model: ``--hf-checkpoint``: a directory or a name on the hub.
        data: Training prompts: a data set as ``--prompt-data`` names it, or rows like
            ``{"prompt": ..., "answer": ...}``, which are written beside ``output_dir``.
        reward: A reward as ``--reward-function`` names it, several of them, or a function of a
            Python file, which runs in processes of its own and is therefore imported from there.
        eval_data: Held-out prompts, like ``data``; ``None`` for no evaluation.
        output_dir: Folder for results. A run refuses one that has those of another.
        num_ranks: Processes of the run; under torchrun its own number counts.
        flags: All other flags by their names with underscores: ``{"train_iters": 20, "lr": 1e-6,
            "use_distributed_optimizer": True, "rl_eval_data": ["a=x.jsonl", "b=y.jsonl"]}``.
            ``None`` and ``False`` leave a flag out.

    Raises:
        UsageError: A flag is unknown, refused or malformed.
        ValueError: A reward is no function that another process can import.
    """

    def __init__(
        self,
        model: str | Path,
        data: str | Path | Rows,
        reward: str | Callable[..., Any] | Sequence[str | Callable[..., Any]],
        *,
        eval_data: str | Path | Rows | None = None,
        output_dir: str | Path = "outputs/run",
        num_ranks: int = 1,
        flags: Flags | None = None,
    ) -> None:
        self.output_dir, self.num_ranks = Path(output_dir), num_ranks
        rewards = [reward] if isinstance(reward, str) or callable(reward) else reward
        typed: dict[str, Any] = {
            "hf_checkpoint": model,
            "prompt_data": self._data_set(data, "prompts"),
            "eval_prompt_data": self._data_set(eval_data, "heldout"),
            "reward_function": [_reward_name(one) for one in rewards],
            "output_dir": self.output_dir,
        }
        self.arguments = [*as_arguments(typed), *as_arguments(flags or {})]
        parse(RLRunConfig, self.arguments, _ENTRY)

    def train(self) -> RunResult:
        """Run it to its end. Under torchrun collective: the world.

        Lines of the run are printed as they come. An interrupt ends the run, too.

        Raises:
            RuntimeError: The run failed; the message has its last lines.
        """
        self._run_processes()
        file = self.output_dir / SUMMARY_FILE
        return RunResult(self.output_dir, json.loads(file.read_text()) if file.exists() else {})

    @property
    def command(self) -> list[str]:
        """The command that :meth:`train` runs; under torchrun that of one rank."""
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(self.num_ranks)]
        several = self.num_ranks > 1 and "RANK" not in os.environ
        return [sys.executable, *(launcher if several else []), "-m", _ENTRY, *self.arguments]

    def _run_processes(self) -> None:
        last: list[str] = []
        with subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that an interrupt reaches all of its processes
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
                    last = [*last, line][-_LAST_LINES:]
            except BaseException:
                _end(process)
                raise
        if process.returncode:
            raise RuntimeError(
                f"{_ENTRY} ended with exit code {process.returncode}:\n{''.join(last)}"
            )

    def _data_set(self, data: str | Path | Rows | None, name: str) -> str:
        if data is None or isinstance(data, str | Path):
            return str(data or "")
        file = self.output_dir.with_name(f"{self.output_dir.name}.{name}.jsonl")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(file, "".join(json.dumps(dict(row)) + "\n" for row in data))
        return str(file)


def as_arguments(flags: Flags) -> list[str]:
    """Return flags by their names with underscores as words of a command line."""
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False or value == "":
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, list | tuple):
            words += [str(one) for one in value]
        elif isinstance(value, Mapping):
            words.append(json.dumps(value))
        elif value is not True:
            words.append(str(value))
    return words


def _reward_name(reward: str | Callable[..., Any]) -> str:
    if isinstance(reward, str):
        return reward
    name = getattr(reward, "__qualname__", "")
    file = inspect.getsourcefile(reward) if inspect.isfunction(reward) else None
    if not file or not Path(file).is_file() or not name.isidentifier():
        raise ValueError(
            f"reward {reward!r}: it runs in other processes, so it must be a function of a Python "
            "file, outside of classes and functions; put it into one (in a notebook: %%writefile "
            "rewards.py) and give 'rewards.py:NAME' or the imported function"
        )
    return f"{Path(file).resolve()}:{name}"


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt a run with all its processes, and kill what does not end by itself."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_STOP_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        return


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
