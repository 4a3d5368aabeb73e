"""Which attempt of its job this process is, and what it leaves behind for the next one.

A job that is started again is several attempts. Whoever starts them (`restart.py`, the driver of
Ray, or torchrun with its own ``--max-restarts``) says so in the environment; a process leaves the
step that it is in, and why it ended, in a folder of the starter.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from mindspeed_rl.checkpoint.resume import find_latest
from mindspeed_rl.command_line.arguments import ParsedArguments, Run
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.recovery_time import MARK, PROCESS
from mindspeed_rl.launch.run_lock import read_note

RESTARTS = "MINDSPEED_RL_RESTARTS"  # number of starts before this one
NOTES = "MINDSPEED_RL_ATTEMPT_NOTES"  # folder for the notes of the ranks of a node
BEGAN = "MINDSPEED_RL_JOB_BEGAN"  # time of the first start, in seconds of the epoch
PEER_FOLDER = "MINDSPEED_RL_PEER_FOLDER"  # of --peer-checkpoint-steps, in shared memory
_STEP, END = "step", "end.json"
_current: list[int | None] = [None]
_marked: set[str] = set()
_IMPORTED_AT = time.time()  # at the start of an entry, as near as a process can tell


@dataclass(frozen=True, slots=True)
class End:
    """Why an attempt ended.

    Attributes:
        kind: Sort of failure, see `failures.Kind`; ``"lost"`` where nobody left a note.
        phase: Phase of the process that failed.
        text: The failure in one line.
        step: Step that was running; ``None`` before the first one.
    """

    kind: str
    phase: str
    text: str
    step: int | None = None


def number_of_restarts(environ: Mapping[str, str] = os.environ) -> int:
    """Return how often the job was started before this attempt."""
    names = (RESTARTS, "TORCHELASTIC_RESTART_COUNT")
    return sum(int(environ.get(name, "0")) for name in names)


class Attempt(NamedTuple):
    """How often a job was started before, and when first, in seconds of the epoch."""

    restarts: int
    began: float

    @classmethod
    def of_node(cls) -> Attempt:
        """Return what the starter of this node knows; after a start of its own, of no restart."""
        return cls(number_of_restarts(), float(os.environ.get(BEGAN, _IMPORTED_AT)))

    def join(self) -> None:
        """Make this process one of the attempt that another node has told of. Local."""
        missing = self.restarts - number_of_restarts()
        os.environ[RESTARTS] = str(int(os.environ.get(RESTARTS, "0")) + missing)
        os.environ[BEGAN] = str(self.began)


def elapsed_s() -> float:
    """Return the seconds since the first start of the job."""
    return max(0.0, time.time() - Attempt.of_node().began)


def restart_metrics(environ: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Return the numbers of restarts and nodes as metrics; empty for a job never restarted."""
    restarts = number_of_restarts(environ)
    nodes = environ.get("GROUP_WORLD_SIZE", "1")
    return {"run/restarts": float(restarts), "run/nodes": float(nodes)} if restarts else {}


def current_step() -> int | None:
    """Return the step that this process is in; ``None`` before the first one."""
    return _current[0]


def note_step(step: int) -> None:
    """Note the step that begins, for this process and for the starter of its node. Local.

    The starter needs it where all ranks are killed at once.
    """
    _current[0] = step
    folder = os.environ.get(NOTES)
    if folder and os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):  # a full disk must not end the run
            Path(folder, _STEP).write_text(str(step))


def note_process() -> None:
    """Tell the starter of the node which process this rank is. Local."""
    _leave(f"{PROCESS}{os.environ.get('LOCAL_RANK', '0')}", str(os.getpid()))


def mark(name: str) -> None:
    """Leave the time at which this attempt reached one of `recovery_time.REACHED` first. Local.

    The first rank of the node does so.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0" and name not in _marked:
        _marked.add(name)
        _leave(f"{MARK}{name}", str(time.time()))


def _leave(name: str, text: str) -> None:
    """Write a note in one step, where a starter wants notes; a full disk does not end the run."""
    folder = os.environ.get(NOTES)
    if folder and Path(folder).is_dir():
        hidden = Path(folder, f".{name}")
        with suppress(OSError):
            hidden.write_text(text)
            hidden.rename(Path(folder, name))


def note_end(kind: str, phase: str, text: str, step: int | None = None) -> None:
    """Leave why this process ends, unless another rank of the node did. Local."""
    folder = os.environ.get(NOTES)
    if not folder or not Path(folder).is_dir():
        return
    whole = Path(folder, f"{END}.{os.getpid()}")
    with suppress(OSError):  # another rank was first, or the disk is full
        whole.write_text(json.dumps(asdict(End(kind, phase, text, step))))
        os.link(whole, Path(folder, END))
    whole.unlink(missing_ok=True)


def read_end(folder: Path, returncode: int) -> End:
    """Return the end of the attempt that left its notes in ``folder``.

    Args:
        folder: Folder that the attempt had in its environment.
        returncode: Exit code of its launcher, of which the text tells where there is no note.
    """
    step = None
    with suppress(OSError, ValueError):
        step = int((folder / _STEP).read_text())
    try:
        end = End(**json.loads((folder / END).read_text()))
        if not all(isinstance(text, str) for text in (end.kind, end.phase, end.text)):
            raise TypeError("not what a rank has left")
        return end if type(end.step) is int else replace(end, step=step)
    except (OSError, ValueError, TypeError, RecursionError):
        text = f"its launcher ended with exit code {returncode}, and no rank said why"
        return End("lost", "unknown", text, step)


def continued(
    parsed: ParsedArguments[Run], environ: Mapping[str, str]
) -> tuple[ParsedArguments[Run], list[str]]:
    """Return the command line of this attempt, and lines about what was changed.

    A restarted job goes on from the newest checkpoint of ``--save`` and adds to the results of its
    earlier attempts. So does a job that was killed before its first checkpoint and is started
    again by hand with the same ``--save`` and ``--load``: its results go, as nothing can be added
    to them. Local; every rank comes to the same result before the ranks meet.
    """
    config: Any = parsed.config
    if not isinstance(config, RLRunConfig | PretrainRunConfig) or not config.checkpoint.save:
        return parsed, []
    options, restarts = config.checkpoint, number_of_restarts(environ)
    newest = find_latest(options.save).path if Path(options.save).is_dir() else None
    same = bool(options.load) and _same(options.save, options.load)
    logging, lines = config.logging, list[str]()
    if restarts and newest is not None and not same:
        options = replace(
            options,
            load=options.save,
            finetune=False,
            no_load_optim=options.no_save_optim,
            no_load_rng=options.no_save_rng,
        )
        lines.append(f"restart {restarts} of this job: it goes on from --save {options.save}")
    own_results = restarts > 0
    if same and newest is None and not restarts and (note := read_note(Path(options.save))):
        own_results = _same(note.output_dir, logging.output_dir)
        if own_results:
            lines.append(
                f"--output-dir {logging.output_dir}: an earlier start of this run ended before its "
                "first checkpoint; its results are replaced"
            )
    if own_results:
        logging = replace(logging, overwrite_output_dir=True)
    config = replace(config, checkpoint=options, logging=logging)
    return replace(parsed, config=cast(Run, config)), lines


def check_peer_folder(config: Any, environ: Mapping[str, str]) -> None:
    """Check that something keeps the copies of ``--peer-checkpoint-steps``. Local.

    Raises:
        UsageError: Nothing outlives the ranks of this node.
    """
    if not isinstance(config, RLRunConfig | PretrainRunConfig):
        return
    steps = config.checkpoint.peer_checkpoint_steps
    if steps and not Path(environ.get(PEER_FOLDER, "/nonexistent")).is_dir():
        raise UsageError(
            f"--peer-checkpoint-steps {steps}: copies are kept by a process that outlives the "
            "ranks; start with torchrun by pretrain_scripts/launch.sh and --max-restarts, or leave "
            "the flag out"
        )


def _same(path: str, other: str) -> bool:
    return bool(path) and Path(path).resolve() == Path(other).resolve()
