"""Where the metrics of a step go: a JSON-lines file, TensorBoard, and trackers.

A training step and an evaluation after it are two records of one step. Only the writer rank (rank
0) touches files. A resumed run calls ``truncate_after`` with the step of its checkpoint, so that no
step is found twice, in any backend.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from mindspeed_rl.config.outputs import EVENT_FILES, METRICS_FILE, TENSORBOARD_FOLDER
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.metrics.jsonl import JsonlWriter, read_jsonl
from mindspeed_rl.metrics.names import is_evaluation

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_S = 5  # TensorBoard lags this much behind; a flush every step costs more than a small step


class MetricBackend(Protocol):
    """One place that receives the metrics of every step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of one step."""

    def truncate_after(self, step: int) -> None:
        """Forgets the steps later than ``step`` and the evaluation after it."""

    def restore(self, step: int, values: Mapping[str, float]) -> None:
        """After ``truncate_after``: the values of ``step``, where they are forgotten as well."""

    def close(self) -> None:
        """Writes out what is pending."""


class RunLogger:
    """Writes the metrics of a run to every backend asked for.

    Args:
        output_dir: folder of the run: ``metrics.jsonl`` and ``tensorboard/`` are made in it.
        is_writer: whether this rank writes; on the others every call does nothing.
        backends: of ``"jsonl"`` and ``"tensorboard"``; both in a run.
        tensorboard_dir: folder of the TensorBoard files; default ``output_dir/tensorboard``.
        others: further places, of :func:`mindspeed_rl.metrics.trackers.make_trackers`.

    Raises:
        UsageError: TensorBoard is asked for and not installed.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        is_writer: bool,
        backends: Sequence[str] = ("jsonl", "tensorboard"),
        tensorboard_dir: str | os.PathLike[str] = "",
        others: Sequence[MetricBackend] = (),
    ) -> None:
        output_dir = Path(output_dir)
        self._metrics_file = output_dir / METRICS_FILE
        folders = {"tensorboard": Path(tensorboard_dir or output_dir / TENSORBOARD_FOLDER)}
        self._backends: list[MetricBackend] = []
        if is_writer:
            own = (_BACKENDS[name](folders.get(name, output_dir)) for name in backends)
            self._backends = [*own, *others]
        # Read even without the jsonl backend asked for: an old run in this folder is a mistake.
        self._last_step = self._last_step_on_disk() if is_writer else -math.inf
        self._last_evaluation = -math.inf

    def truncate_after(self, step: int) -> None:
        """Drops what a run that goes on after ``step`` logs again: later steps, and evaluations.

        A checkpoint is saved before the evaluation of its step, so that one is made again, too.
        """
        for backend in self._backends:
            backend.truncate_after(step)
        kept = [r for r in read_jsonl(self._metrics_file) if r["step"] == step]
        for backend in self._backends:
            for record in kept:
                backend.restore(step, {n: v for n, v in record.items() if isinstance(v, float)})
        self._last_step = min(self._last_step, step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs all metrics of one step.

        Raises:
            RuntimeError: the step is not later than the last one logged, here or by an earlier run
                in the same folder.
        """
        if not self._backends:
            return
        if step <= self._last_step:
            raise RuntimeError(
                f"step {step} is logged after step {self._last_step:.0f} in "
                f"{self._metrics_file}: log every step once, in order; to resume call "
                "truncate_after(step of the checkpoint), to start anew choose another folder"
            )
        for backend in self._backends:
            backend.log(step, values)
        self._last_step = step

    def log_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Logs what an evaluation after ``step`` found, under that step; 0: before the first one.

        Raises:
            UsageError: a name does not begin with ``eval/``.
        """
        assert step > self._last_evaluation and step >= self._last_step, "evaluations in order"
        wrong = [name for name in values if not is_evaluation(name)]
        if wrong:
            raise UsageError(f"metrics {wrong} of an evaluation must begin with eval/")
        for backend in self._backends:
            backend.log(step, values)
        self._last_evaluation = step

    def close(self) -> None:
        """Writes out what is pending and closes the files."""
        for backend in self._backends:
            backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _last_step_on_disk(self) -> float:
        return max((record["step"] for record in read_jsonl(self._metrics_file)), default=-math.inf)


class _JsonlBackend:
    """``metrics.jsonl``: one object per step, non-finite values as null (see ``encode_json``)."""

    def __init__(self, output_dir: Path) -> None:
        self._writer = JsonlWriter(output_dir / METRICS_FILE)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._writer.append(step, values)

    def truncate_after(self, step: int) -> None:
        self._writer.keep(lambda record: record["step"] < step or _is_of_training(record, step))

    def restore(self, step: int, values: Mapping[str, float]) -> None:
        """They are still there."""

    def close(self) -> None:
        self._writer.close()


def _is_of_training(record: Mapping[str, Any], step: int) -> bool:
    return record["step"] == step and not any(is_evaluation(name) for name in record)


class _TensorBoardBackend:
    """Scalars for TensorBoard; a later event file hides the purged steps of the earlier ones.

    TensorBoard knows steps only, so the step of the checkpoint is hidden with the evaluation after
    it, and written again. Events of other runs in the folder are hidden, never removed.
    """

    def __init__(self, log_dir: Path) -> None:
        try:
            # Imported here: it takes seconds, and only the writer rank needs it.
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f'log backend "tensorboard" needs the package tensorboard ({error}); '
                "install it, or leave the backend out"
            ) from error
        self._make_writer, self._make_summary = SummaryWriter, Summary
        self._log_dir = log_dir
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            if self._purge_step is None and any(self._log_dir.glob(EVENT_FILES)):
                self._purge_step = 0
            self._writer = self._make_writer(
                str(self._log_dir), purge_step=self._purge_step, flush_secs=FLUSH_S
            )
        # one event: a tenth of the time of one per scalar, in which the other ranks wait
        scalars = [self._make_summary.Value(tag=n, simple_value=v) for n, v in values.items()]
        events: Any = self._writer.file_writer
        events.add_summary(self._make_summary(value=scalars), step)

    def truncate_after(self, step: int) -> None:
        self.close()
        self._purge_step = step

    def restore(self, step: int, values: Mapping[str, float]) -> None:
        self.log(step, values)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


_BACKENDS: dict[str, Callable[[Path], MetricBackend]] = {
    "jsonl": _JsonlBackend,
    "tensorboard": _TensorBoardBackend,
}
