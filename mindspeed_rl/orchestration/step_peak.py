"""The largest moment of an update, measured beside its prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from mindspeed_rl.dryrun.budget import assumptions_of, machine_on
from mindspeed_rl.memory.prediction import predict
from mindspeed_rl.memory.training import Workload
from mindspeed_rl.observability.metrics import Max, MetricSet
from mindspeed_rl.observability.tensor_tracker import TensorTracker
from mindspeed_rl.rl.build import RLJob
from mindspeed_rl.trainer.prepared import PreparedBatch

MEASURED, PREDICTED = "memory/in_step_peak_bytes", "memory/in_step_predicted_bytes"


@contextmanager
def watch_update(run: RLJob, batches: Sequence[PreparedBatch]) -> Iterator[MetricSet]:
    """Measure how far forward and backward passes exceed what was there before the block. Local.

    Where the device's allocator counts, it is read at every step. On a CPU every operator of the
    block is watched instead, in the steps that ``--memory-peak-interval`` names.

    Yields:
        What is filled when the block ends: measured and predicted bytes, both or none.
    """
    found = MetricSet()
    grown = run.job.platform.watch_peak()
    tracker = TensorTracker() if grown is None and _is_due(run) else None
    with tracker or nullcontext():
        yield found
    if tracker is not None:
        found[MEASURED] = Max(tracker.peak_bytes)
    elif grown is not None:
        found[MEASURED] = Max(grown())
    if found:
        found[PREDICTED] = Max(_predicted(run, batches))


def _is_due(run: RLJob) -> bool:
    interval = run.config.memory.memory_peak_interval
    return bool(interval) and (run.num_steps - 1) % interval == 0


def _predicted(run: RLJob, batches: Sequence[PreparedBatch]) -> int:
    assumptions = assumptions_of(run.config, machine_on(run.config, run.job.platform.name))
    training = predict(run.config, run.plan, assumptions).training
    cp = run.plan.parallel.cp
    work = Workload(
        tokens=max(b.batch.num_tokens for b in batches) * cp,
        sequence=max(length for b in batches for length in b.batch.lengths),
        trained=max(int(b.batch.loss_mask.sum()) for b in batches) * cp,
        num_micro_batches=len(batches),
        entropy_gradient=run.config.rl.grpo_entropy_term_weight != 0,
    )
    return training.peak(run.rank, work).in_step
