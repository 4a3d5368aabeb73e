"""Times the copies of weights into experts that an engine stores transposed.

    python tools/bench/transposed_experts.py                     # three shapes on CPU, a minute
    python tools/bench/transposed_experts.py --device cuda       # or npu, with torch_npu installed

plain       rows of an expert from the memory of a message into an expert that is stored alike
transposed  the same into an expert that is stored with rows and columns exchanged, as engines
            for NPUs keep experts: the copy that the weight sync makes, on CPU matrix by matrix
at once     the same as one copy of all experts into the transposed view

All ways write the same experts of one layer, in turns; afterwards the bits are compared. The speed
is that of the bytes written, reading not counted, as the median of the repeats; the ratio is the
speed of the way over that of plain. The last line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import torch

from bench.jobs import parser_of, print_result
from mindspeed_rl.core.boxes import Box, ParamView
from mindspeed_rl.core.tables import aligned
from mindspeed_rl.weights.exchange import copy_within
from mindspeed_rl.weights.planner import Place, Rectangle, Transfer

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class ExpertCase:
    """Experts of one layer on a rank: their number, and rows and columns as in the HF tensor."""

    count: int
    rows: int
    columns: int


CASES = {
    "qwen3-30b-a3b up": ExpertCase(32, 768, 2048),
    "qwen3-30b-a3b down": ExpertCase(32, 2048, 768),
    "deepseek-v3 up": ExpertCase(4, 2048, 7168),
    "tiny": ExpertCase(3, 24, 40),
}


def transfer_of(case: ExpertCase, *, transposed: bool) -> Transfer:
    """Return the transfer of a run of experts from a message into the engine's stack of experts."""
    box = Box.whole((case.rows, case.columns))
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    message, stack = Place(box, ParamView((0,))), Place(box, ParamView((0,), transposed))
    where = Rectangle(box, message, stack)
    return Transfer(0, 0, name, where, ("message",), ("stack",), num_tensors=case.count)


def ways_of(case: ExpertCase, device: torch.device) -> dict[str, tuple[Callable[[], Any], Any]]:
    """Return each way with a function that shows what it wrote as [experts, rows, columns]."""
    shape = case.count, case.rows, case.columns
    bits = torch.arange(case.count * case.rows * case.columns) * 40503 % 0x3FFF
    message = bits.to(torch.int16).view(DTYPE).view(shape).to(device)
    plain = torch.zeros(shape, dtype=DTYPE, device=device)
    turned, twice = (
        torch.zeros((case.count, case.columns, case.rows), dtype=DTYPE, device=device)
        for _ in range(2)
    )
    read = {"message": message}
    straight, across = (transfer_of(case, transposed=t) for t in (False, True))

    return {
        "plain": (lambda: copy_within((straight,), read, {"stack": plain}), lambda: plain),
        "transposed": (
            lambda: copy_within((across,), read, {"stack": turned}),
            lambda: turned.transpose(1, 2),
        ),
        "at once": (lambda: twice.mT.copy_(message), lambda: twice.transpose(1, 2)),
        "message": (lambda: None, lambda: message),
    }


def measure(name: str, repeats: int, device: torch.device) -> dict[str, Any]:
    """Time all ways of a case.

    Raises:
        RuntimeError: A way wrote other bits than those of the message.
    """
    case, ways = CASES[name], ways_of(CASES[name], device)
    message = ways.pop("message")[1]()
    num_bytes = message.numel() * DTYPE.itemsize
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):  # the first run is not timed
        for way, (copy, _) in ways.items():
            _wait(device)
            start = time.perf_counter()
            copy()
            _wait(device)
            if repeat:
                seconds[way].append(time.perf_counter() - start)
    for way, (_, written) in ways.items():
        if not torch.equal(written().contiguous().view(torch.int16), message.view(torch.int16)):
            raise RuntimeError(f"{name}, {way}: other bits than those of the message")
    speeds = {way: num_bytes / statistics.median(s) / 1e9 for way, s in seconds.items()}
    ratios = {way: speed / speeds["plain"] for way, speed in speeds.items()}
    return {
        "case": name, "experts": case.count, "rows": case.rows, "columns": case.columns,
        "bytes": num_bytes, "gb_per_s": speeds, "ratio": ratios,
    }  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def main(args: argparse.Namespace) -> None:
    """Measure and print."""
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    results = [measure(name, args.repeats, device) for name in args.cases]
    header = ["experts", "shape", "plain GB/s", "transposed", "ratio", "at once", "ratio"]
    rows = [
        [
            r["case"],
            f"{r['experts']} x {r['rows']} x {r['columns']}",
            *(
                text
                for way in ("plain", "transposed", "at once")
                for text in (
                    f"{r['gb_per_s'][way]:.2f}",
                    *([f"{r['ratio'][way]:.2f}"] if way != "plain" else []),
                )
            ),
        ]
        for r in results
    ]
    print("\n".join(aligned([header, *rows])))
    print_result("transposed_experts", device=args.device, threads=args.threads, cases=results)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    usual = [name for name in CASES if name != "tiny"]
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=usual)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    main(parser.parse_args())
