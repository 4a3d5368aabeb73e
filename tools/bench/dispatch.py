"""Times the hand-over of samples from one stage to the next: controller, Ray with a cache, SPMD.

    python tools/bench/dispatch.py --workers 2 4 --megabytes 16 64
    python tools/bench/dispatch.py --workers 2 4 8 16 --megabytes 16 32 64 128 256

(a) controller       a single controller fetches every worker's samples through Ray's object store,
                     makes one batch of them and sends every worker its part, one after the other;
                     zero-copy (numpy arrays, out of band) or torch.save: the faster counts
(b) ray with cache   the controller sends a step number; workers learn the sample table, plan and
                     move the samples among themselves (TensorCache, Redistribution)
(c) spmd             the same workers without orders, after a barrier of their own

All ways hand over the same 1024 ragged samples of an id and a log-prob per token (log-normal
lengths), and what has arrived is compared bit by bit. ``agree``: the next stage wants samples where
they were made; ``move``: all of them on the next worker. Seconds: from the first order until the
last worker has its samples in its own memory. Start skew: from the first worker that has them to
the last. Of seconds the best of the repeats is taken (what else runs on the machine only adds), of
start skews the median. ``bare``: one all-to-all of the same bytes.

The plane seconds = a + b B + c W is fitted to these (and to the start skews), B in MB (2^20 bytes)
of all samples together, with 95 % intervals. Predicted seconds are the plane's, far outside of what
was measured: for one host that serialises; for samples that move, b is that of workers with a core
each, while c is always as measured, with W workers on the cores of this machine, so that what each
does for itself adds up in it. The last line is RESULT and a JSON object. Needs the extra ray.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ in ("__main__", "__mp_main__"):
    # the folder of the package `bench` instead of that of this file
    sys.path[0] = str(ROOT / "tools")

from bench.dispatch_fit import Plane, Point, fit  # noqa: E402
from bench.dispatch_report import fits, growth, predictions, table  # noqa: E402

if TYPE_CHECKING:
    from bench.dispatch_ways import Batch

CONTROLLER = ("controller zero-copy", "controller torch.save")
STORE_SPARE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """One way at one W and B, every repeat."""

    way: str
    workers: int
    megabytes: int
    seconds: list[float]
    skew_s: list[float]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4], help="W (2 4)")
    parser.add_argument(
        "--megabytes", type=int, nargs="+", default=[16, 64], help="B, of all samples (16 64)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed hand-overs of each (3)")
    parser.add_argument(
        "--add",
        type=Path,
        nargs="+",
        default=[],
        help="outputs of runs with other --workers, to be fitted with this one, if any",
    )
    args = parser.parse_args(argv)
    if min(args.workers, default=2) < 2 or min(args.megabytes) < 1 or args.repeats < 1:
        parser.error("at least 2 workers, 1 MB and 1 repeat")
    return args


def main() -> None:
    """Measure, fit, predict."""
    args = parse()
    from bench.dispatch_ways import memcpy_bytes_per_s

    memcpy = memcpy_bytes_per_s(max(args.megabytes))
    measured = [m for file in args.add for m in measured_in(file)]
    measured += measure(args) if args.workers else []
    seconds: dict[str, list[Point]] = {}
    skews: dict[str, list[Point]] = {}
    for m in measured:
        typical = ((seconds, min(m.seconds)), (skews, statistics.median(m.skew_s)))
        for found, value in typical:
            found.setdefault(m.way, []).append(Point(m.workers, m.megabytes, value))
    seconds["controller"], skews["controller"] = faster(seconds, skews)
    print("\n".join(table(seconds, skews, memcpy)))
    planes: dict[str, dict[str, Plane]] = {}
    if all(len({of(m) for m in measured}) > 1 for of in (_workers, _megabytes)):
        for name, points in (("seconds", seconds), ("start skew", skews)):
            planes[name] = {way: fit(found) for way, found in points.items()}
            print("\n".join(["", *fits(name, planes[name])]))
        predicted = predictions(planes["seconds"], planes["start skew"])
        print("\n".join(["", *growth(seconds), "", *predicted]))
    result = {
        "memcpy_bytes_per_s": memcpy,
        "cpus": len(os.sched_getaffinity(0)),
        "measured": [asdict(m) for m in measured],
        "planes": {
            name: {way: asdict(plane) for way, plane in found.items()}
            for name, found in planes.items()
        },
    }
    print("RESULT", json.dumps(result))


def _workers(measured: Measured) -> int:
    return measured.workers


def _megabytes(measured: Measured) -> int:
    return measured.megabytes


def measured_in(file: Path) -> list[Measured]:
    """What the last line of an earlier run's output holds."""
    lines = [line for line in file.read_text().splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"--add {file}: no line begins with RESULT; the run has not ended")
    return [
        Measured(**entry) for entry in json.loads(lines[-1].removeprefix("RESULT "))["measured"]
    ]


def faster(
    seconds: Mapping[str, Sequence[Point]], skews: Mapping[str, Sequence[Point]]
) -> tuple[list[Point], list[Point]]:
    """Of the controller's two ways the faster one at each point: seconds and start skew."""
    places = range(len(seconds[CONTROLLER[0]]))
    best = [min(CONTROLLER, key=lambda way, i=i: seconds[way][i].seconds) for i in places]  # type: ignore[misc]
    return [seconds[way][i] for i, way in enumerate(best)], [
        skews[way][i] for i, way in enumerate(best)
    ]


def measure(args: argparse.Namespace) -> list[Measured]:
    """All ways at all sizes, with the actors of one local Ray."""
    from bench.dispatch_ways import Worker

    most = max(args.workers)
    found = []
    with local_ray(most, max(args.megabytes)) as ray, tempfile.TemporaryDirectory() as folder:
        kind = ray.remote(num_cpus=1)(Worker)
        actors = [kind.remote(rank, most) for rank in range(most)]
        ray.get([actor.join.remote(f"{folder}/store", args.workers) for actor in actors])
        steps = iter(range(1, 1 << 30))
        for workers in args.workers:
            for megabytes in args.megabytes:
                found += at_size(ray, actors[:workers], megabytes, args.repeats + 1, steps)
            print(f"W {workers} measured", file=sys.stderr, flush=True)
    return found


def at_size(
    ray: Any, actors: Sequence[Any], megabytes: int, repeats: int, steps: Iterator[int]
) -> list[Measured]:
    """All ways, each ``repeats`` times; the first one of each is checked and not timed."""
    from bench.dispatch_ways import AGREE, MOVE, Batch

    size = Batch(len(actors), megabytes)
    found = []

    def on_order(way: str, shift: int, once: Callable[[Batch], Handover]) -> None:
        runs = []
        for repeat in range(repeats):
            batch = size.at(next(steps))
            ray.get([actor.make.remote(batch) for actor in actors])
            runs.append(once(batch))
            if not repeat:
                ray.get([actor.check.remote(batch, shift) for actor in actors])
        found.append(as_measured(way, size, runs[1:]))

    for way in CONTROLLER:
        on_order(way, MOVE, partial(serially, ray, actors, way.endswith("torch.save")))
    for name, shift in (("agree", AGREE), ("move", MOVE)):
        on_order(f"ray with cache, {name}", shift, partial(ordered, ray, actors, shift))
    for name, shift in (("agree", AGREE), ("move", MOVE)):
        # one order for all of them: nobody but the workers has a part in what follows
        batches = [size.at(next(steps)) for _ in range(repeats)]
        times = ray.get([actor.spmd.remote(batches, shift) for actor in actors])
        ray.get([actor.check.remote(batches[-1], shift) for actor in actors])
        found.append(as_measured(f"spmd, {name}", size, together(times)[1:]))
    times = ray.get([actor.bare.remote(size, repeats) for actor in actors])
    found.append(as_measured("bare", size, together(times)[1:]))
    return found


def together(times: Sequence[Sequence[tuple[float, float]]]) -> list[Handover]:
    """Of hand-overs that workers began by themselves: by worker, when each began and was done."""
    runs = []
    for of_one in zip(*times, strict=True):
        done = [end for _, end in of_one]
        runs.append(Handover(max(done) - min(b for b, _ in of_one), max(done) - min(done)))
    return runs


@dataclass(frozen=True, slots=True)
class Handover:
    """One hand-over: seconds of all of it, and between the first and the last worker's start."""

    seconds: float
    skew_s: float


def as_measured(way: str, batch: Batch, runs: Sequence[Handover]) -> Measured:
    """All repeats of a way."""
    return Measured(
        way, batch.workers, batch.megabytes, [r.seconds for r in runs], [r.skew_s for r in runs]
    )


@contextmanager
def local_ray(workers: int, megabytes: int) -> Iterator[Any]:
    """A Ray of this machine whose object store holds a batch three times."""
    from mindspeed_rl.launch.ray import import_ray

    ray = import_ray()
    path = os.pathsep.join([str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False,
        logging_level="ERROR", _node_ip_address="127.0.0.1",
        object_store_memory=3 * megabytes * 2**20 + STORE_SPARE_BYTES,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    try:
        yield ray
    finally:
        ray.shutdown()


def serially(ray: Any, actors: Sequence[Any], saved_by_torch: bool, batch: Batch) -> Handover:
    """Through the controller: fetch, join, cut, send to one worker after the other."""
    import io

    import torch

    from bench.dispatch_ways import cut, joined, saved

    sizes = [sum(batch.lengths[i] for i in batch.of_worker(w)) for w in range(batch.workers)]
    began = time.monotonic()
    if saved_by_torch:
        answers = ray.get([actor.give_saved.remote() for actor in actors])
        loaded = [torch.load(io.BytesIO(answer), weights_only=True) for answer in answers]
        whole = joined([{name: t.numpy() for name, t in part.items()} for part in loaded])
    else:
        whole = joined(ray.get([actor.give.remote() for actor in actors]))
    calls = []
    for worker, actor in enumerate(actors):
        part = cut(whole, sizes, (worker - 1) % batch.workers)
        calls.append(
            actor.take_saved.remote(saved(part)) if saved_by_torch else actor.take.remote(part)
        )
    done = ray.get(calls)
    return Handover(max(done) - began, max(done) - min(done))


def ordered(ray: Any, actors: Sequence[Any], shift: int, batch: Batch) -> Handover:
    """By an order of a few bytes to every worker."""
    began = time.monotonic()
    times = ray.get([actor.redistribute.remote(batch, shift) for actor in actors])
    done = [end for _, end in times]
    return Handover(max(done) - began, max(done) - min(done))


if __name__ == "__main__":
    main()
