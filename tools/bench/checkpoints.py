"""Times what a checkpoint takes from a run: written at once, and in the background (--async-save).

    python tools/bench/checkpoints.py           # 2 ranks, 0.5 GB of weights, masters and moments

at once      plan who writes what, check values, write and flush the files, make it valid
background   plan, and copy the state to host memory that is kept from save to save; values are
             checked and files written while the next step runs
floor        a plain copy of as many bytes into memory that is as warm

The two alternate in one run, and the files of both are compared by checksum; numbers are medians of
the slowest rank. Before that, one save of each kind shows the host memory that it takes beside the
state, as the growth of the largest resident size, next to the bytes that the rank stores and to
what a dry run predicts. The last line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import torch
import torch.distributed as dist

from bench.jobs import parser_of, print_result, slowest
from bench.switch import launch, start
from mindspeed_rl.checkpoint import metadata_files, resume
from mindspeed_rl.platforms import host_memory


def race(args: argparse.Namespace) -> None:
    """Alternate the ways and print the results on rank 0. Collective: the world."""
    from mindspeed_rl.building import models as build_models
    from mindspeed_rl.checkpoint.background import BackgroundWriter
    from mindspeed_rl.trainer_state.checkpoint import plan_checkpoint

    job = start(args)
    build_models.initialize_parallel(job)
    policy = build_models.build_engine(job, "policy", 1)
    update = updater(job, policy)
    update()  # creates the moments
    writer, seconds = BackgroundWriter(), defaultdict[str, list[float]](list)
    root = Path(args.model).parent / "saved"

    def timed(name: str, act: Callable[..., Any], *args: Any) -> Any:
        dist.barrier()
        begin = time.perf_counter()
        result = act(*args)
        seconds[name].append(time.perf_counter() - begin)
        return result

    def plan(folder: str, step: int) -> Any:
        everything: dict[str, Any] = {"with_optimizer": True, "with_rng": True, "companions": {}}
        return plan_checkpoint(root / folder, step, policy, {}, **everything)

    def at_once(folder: str, step: int) -> Path:
        unwritten = timed("plan", plan, folder, step)
        timed("check", unwritten.check_values)
        written: Path = timed("write", unwritten.write)
        return written

    def in_background() -> None:
        writer.start(plan("memory", 2))
        writer.wait()

    memory = memory_of(plan("memory", 0), job)
    memory["at_once"] = growth(lambda: at_once("memory", 1))
    memory["background"] = growth(in_background)
    seconds.clear()
    for repeat in range(1, args.repeats + 1):
        timed("step alone", update)
        first = at_once("at-once", repeat)
        timed("copy", writer.start, timed("plan", plan, "background", repeat))
        begin = time.perf_counter()
        timed("step meanwhile", update)
        background = writer.wait()
        seconds["until written"].append(time.perf_counter() - begin)
        compare(first, background)
    seconds["floor"] = floor(memory["stored"], args.repeats)
    report(args, {name: statistics.median(found) for name, found in seconds.items()}, memory)


def updater(job: Any, policy: Any) -> Callable[[], None]:
    """Return a function that takes an optimizer step on the same few samples."""
    from mindspeed_rl.algorithms.losses import supervised_loss
    from mindspeed_rl.building import models as build_models
    from mindspeed_rl.core.types import TrainSample

    samples = [TrainSample(i, torch.arange(5, 69), 32) for i in range(job.world.size)]
    num_tokens = 32 * len(samples)

    def update() -> None:
        batches = policy.prepare(build_models.batch_rules(job).pack_own(samples))
        policy.forward_backward(batches, lambda inputs: supervised_loss(inputs, num_tokens))
        policy.step()

    return update


def compare(at_once: Path, background: Path | None) -> None:
    """End the benchmark where the two ways have not written the same bytes. Local."""
    assert background is not None
    first, second = (resume.marks_of(path) for path in (at_once, background))
    for marks in (first, second):
        del marks[metadata_files.INDEX]  # it has a random number of its own
    differ = [name for name in first if first[name] != second.get(name)]
    if differ or len(first) != len(second):
        raise RuntimeError(f"{background} differs from {at_once}: {differ}")


def memory_of(unwritten: Any, job: Any) -> dict[str, int]:
    """Return the bytes of this rank: what it stores, and what a dry run says that saves take."""
    from mindspeed_rl.planning.model_state import save_host_bytes

    settings: dict[str, Any] = {"bf16": True, "with_optimizer": True, "on_host": True}
    layout, rank = job.plan.megatron, dist.get_rank()
    tensors = (tensor for part in unwritten.parts.values() for _, tensor in part.tensors())
    return {
        "stored": sum(tensor.nbytes for tensor in tensors),
        "predicted_at_once": save_host_bytes(layout, rank, in_background=False, **settings),
        "predicted_background": save_host_bytes(layout, rank, in_background=True, **settings),
    }


def growth(act: Callable[[], Any]) -> int:
    """Return by how many bytes the largest resident size grows while something is done."""
    gc.collect()
    dist.barrier()
    host_memory.reset_peak_bytes()
    before = host_memory.peak_bytes()
    act()
    return host_memory.peak_bytes() - before


def floor(num_bytes: int, repeats: int) -> list[float]:
    """Return the seconds of plain copies of as many bytes."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target, seconds = source.clone(), []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begin)
    return seconds


def report(args: argparse.Namespace, mine: dict[str, float], memory: dict[str, int]) -> None:
    """Print the seconds and bytes of the slowest and largest rank. Collective: the world."""
    seconds, found = slowest(mine), slowest(memory)
    if dist.get_rank():
        return
    for name, taken in seconds.items():
        print(f"{name:15} {taken:8.3f} s")
    whole = sum(seconds[part] for part in ("plan", "check", "write"))
    exposed = seconds["plan"] + seconds["copy"]
    stored = found.pop("stored")
    print(
        f"{stored / 1e6:.0f} MB of a rank: at once {whole:.3f} s, in the background {exposed:.3f} s"
        f" are left, {100 * exposed / whole:.1f} %; a plain copy {seconds['floor']:.3f} s"
    )
    for name, size in found.items():
        print(f"host memory {name:20} {size / 1e6:6.1f} MB, {size / stored:.2f} of what is stored")
    print_result(
        "checkpoints", ranks=args.ranks, bytes=stored, seconds=seconds, at_once_s=whole,
        exposed_s=exposed, memory=found,
    )  # fmt: skip


def main() -> None:
    """Start the ranks, or run as one of them."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks (2)")
    parser.add_argument("--num-layers", type=int, default=2, help="layers of 12.8 M weights (2)")
    parser.add_argument("--hidden-size", type=int, default=1024, help="a multiple of 64 (1024)")
    parser.add_argument("--repeats", type=int, default=5, help="checkpoints of each way (5)")
    parser.add_argument("--folder", default="", help="where checkpoints are written (a temporary)")
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.kv_cache_gb = 0.01  # no engine is built
    if args.model:
        race(args)
    else:
        launch(__file__, args, args.folder)


if __name__ == "__main__":
    main()
