"""Writes the metrics of each step to a JSON-lines file, TensorBoard, and trackers.

A training step and an evaluation after it are two records of one step. Only the writer rank (rank
0) touches files. A resumed run calls ``truncate_after`` with the step of its checkpoint, so that no
backend has a step twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed_rl.config.outputs import EVENT_FILES, METRICS_FILE
from mindspeed_rl.metrics.jsonl import FULL_DISK, JsonlWriter, read_jsonl
from mindspeed_rl.metrics.names import in_order, is_evaluation

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

FLUSH_S = 5  # delay of TensorBoard; a flush every step would cost more than a small step


class MetricBackend(Protocol):
    """A place to which the metrics of every step are written."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step."""

    def truncate_after(self, step: int) -> None:
        """Forget the steps later than ``step`` and the evaluation after it."""

    def restore(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of ``step`` again, if ``truncate_after`` forgot these as well."""

    def close(self) -> None:
        """Write out pending values."""


class RunLogger:
    """Writes the metrics of a run to all of its backends.

    Args:
        output_dir: Folder of the run, with ``metrics.jsonl``.
        is_writer: Whether this rank writes; on the others every call does nothing.
        others: Further backends: TensorBoard, and those of
            :func:`mindspeed_rl.metrics.trackers.make_trackers`.
        watched: Name of a metric whose values are kept in ``watched_values``, by step.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        is_writer: bool,
        others: Sequence[MetricBackend] = (),
        watched: str = "",
    ) -> None:
        self._watched = watched
        self.watched_values: dict[int, float] = {}
        self._metrics_file = Path(output_dir) / METRICS_FILE
        self._backends: list[MetricBackend] = []
        if is_writer:
            self._backends = [_JsonlBackend(self._metrics_file), *others]

    def truncate_after(self, step: int) -> None:
        """Drop the steps and evaluations that a run resumed after ``step`` logs again.

        A checkpoint is saved before the evaluation of its step, which is therefore repeated.
        """
        self.watched_values = {n: v for n, v in self.watched_values.items() if n < step}
        for backend in self._backends:
            backend.truncate_after(step)
        kept = [r for r in read_jsonl(self._metrics_file) if r["step"] == step]
        for backend in self._backends:
            for record in kept:
                backend.restore(step, {n: v for n, v in record.items() if isinstance(v, float)})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log all metrics of one step, or those of an evaluation after it.

        The names of an evaluation begin with ``eval/``; step 0 is before the first step.
        """
        if self._watched in values:
            self.watched_values[step] = values[self._watched]
        ordered = in_order(values)
        for backend in self._backends:
            backend.log(step, ordered)

    def close(self) -> None:
        """Write out pending values and close the files."""
        for backend in self._backends:
            backend.close()


class _JsonlBackend:
    """Backend of ``metrics.jsonl``: an object per record, encoded by ``encode_json``."""

    def __init__(self, file: Path) -> None:
        self._writer = JsonlWriter(file)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._writer.append(step, values)

    def truncate_after(self, step: int) -> None:
        self._writer.keep(lambda record: record["step"] < step or _is_of_training(record, step))

    def restore(self, step: int, values: Mapping[str, float]) -> None:
        """The record of ``step`` is kept by ``truncate_after``."""

    def close(self) -> None:
        self._writer.close()


def _is_of_training(record: Mapping[str, Any], step: int) -> bool:
    return record["step"] == step and not any(is_evaluation(name) for name in record)


class TensorBoardBackend:
    """Backend of TensorBoard, where a later event file hides the purged steps of earlier ones.

    TensorBoard knows steps only, so the step of the checkpoint is hidden with the evaluation after
    it, and written again. Events of other runs in the folder are hidden, never removed. Where the
    disk is full, steps are left out there, and a warning says so once.

    Args:
        log_dir: Folder of the event files.
        description: Text in Markdown that is shown beside the curves.
    """

    def __init__(self, log_dir: str | os.PathLike[str], description: str = "") -> None:
        # Imported here: it takes seconds, and only the writer rank needs it.
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._make_writer, self._make_summary = SummaryWriter, Summary
        self._log_dir = Path(log_dir)
        self._description = description
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None
        self._has_warned = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        try:
            self._log(step, values)
        except OSError as error:  # of a thread of the writer, which ended with it
            self._leave_out(error)
            self._writer, self._purge_step = None, step

    def _leave_out(self, error: OSError) -> None:
        if error.errno not in FULL_DISK:
            raise error
        if not self._has_warned:
            logger.warning(
                "%s: %s; its curves lack steps until there is room, metrics.jsonl has them all",
                self._log_dir,
                error.strerror,
            )
        self._has_warned = True
        if self._writer is not None:
            with suppress(OSError):  # the same again
                self._writer.close()

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            if self._purge_step is None and any(self._log_dir.glob(EVENT_FILES)):
                self._purge_step = 0
            self._writer = self._make_writer(
                str(self._log_dir), purge_step=self._purge_step, flush_secs=FLUSH_S
            )
            if self._description:
                self._writer.add_text("config", self._description, step)
        # One event for all scalars takes a tenth of the time, in which the other ranks wait.
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
            try:
                self._writer.close()
            except OSError as error:
                self._leave_out(error)
            self._writer = None
