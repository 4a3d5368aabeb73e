"""Times what the host does between the kernels of the engine's decode steps, on the CPU engine.

    python tools/bench/engine_steps.py                  # 256 sequences, 2 layers, 1 minute

host        processor time of the thread that generates, from the end of one decode step to the end
            of the next, less that in the model's forward pass, in the logits and in drawing the
            tokens (noise and argmax, without its seeds): scheduling, inputs, metadata, log-softmax
            and gathering of log-probs, outputs, our own bookkeeping, and garbage collection
objects     objects that the garbage collector tracks, added per token of running responses

ours        the product
baseline    vLLM's own ways: a generator and a draw for each request, log-probs as one object per
            token, the collector running

Each way runs in a process of its own, one after the other, in several rounds; seconds are medians
over steps with all sequences running, and the smallest median of all rounds. The last line is
RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import torch

from bench.engine_alone import PROMPT, add_engine_flags, build, started
from bench.jobs import parser_of, print_result
from mindspeed_rl.core.tables import aligned

WAYS = ("ours", "baseline")
WARM = 8


class Clock:
    """Processor time of this thread, without that in some functions.

    Attributes:
        kernels: seconds in the functions so far.
    """

    def __init__(self) -> None:
        self.kernels = 0.0

    def leave_out(self, owner: Any, name: str) -> None:
        """Time an attribute of an object from now on as a kernel."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.kernels += time.thread_time() - start

        setattr(owner, name, timed)

    def host(self) -> float:
        """Seconds of this thread so far that are not in kernels."""
        return time.thread_time() - self.kernels


@contextmanager
def baseline() -> Iterator[None]:
    """Leave vLLM's own ways in place in this process."""
    from mindspeed_rl.engines.vllm import engine, requests
    from mindspeed_rl.rollout import open_requests
    from mindspeed_rl.vllm_patches import sampled_logprobs, seeded_draws

    settings = requests.sampling_params

    def by_objects(*args: Any) -> Any:
        params = settings(*args)
        params.flat_logprobs = False
        return params

    def logprobs(output: Any) -> tuple[float, ...]:
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        return tuple(entry[token].logprob for token, entry in pairs)

    with ExitStack() as stack:
        for owner, name, other in (
            (seeded_draws, "apply", lambda: None),
            (seeded_draws, "use_in", lambda _: None),
            (sampled_logprobs, "apply", lambda: None),
            (engine, "collection_afterwards", nullcontext),
            (requests, "sampling_params", by_objects),
            (open_requests, "sampled_logprobs", logprobs),
        ):
            stack.enter_context(mock.patch.object(owner, name, other))
        yield


def kernels_of_drawing(way: str) -> list[tuple[Any, str]]:
    """Return the functions that draw tokens, as objects with the names of their attributes."""
    if way == "baseline":
        return [(torch.ops._C, "fused_gumbel_argmax")]
    from mindspeed_rl.vllm_patches import seeded_draws

    return [(seeded_draws, "draw_tokens")]


def measure(args: argparse.Namespace) -> None:
    """Generate as one of the ways and print host seconds per step and objects per token."""
    from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings, request_seed

    with ExitStack() as stack:
        if args.way == "baseline":
            stack.enter_context(baseline())
        engine = build(args, args.sequences)
        clock = Clock()
        drawn = kernels_of_drawing(args.way)
        runner = engine._engine.model_executor.driver_worker.worker.model_runner
        for owner, name in ((runner, "_model_forward"), (runner.model, "compute_logits"), *drawn):
            clock.leave_out(owner, name)
        requests = [
            GenerationRequest(i, tuple(range(5 + i % 7, 5 + i % 7 + PROMPT)), request_seed(0, 1, i))
            for i in range(args.sequences)
        ]
        ends: list[float] = []
        objects: dict[int, int] = {}

        def on_step(_: object) -> None:
            ends.append(clock.host())
            if len(ends) in (WARM, args.tokens - WARM):
                gc.collect()
                objects[len(ends)] = len(gc.get_objects())
                ends[-1] = clock.host()  # what follows is timed from here

        settings = SamplingSettings(1.0, args.tokens, ())
        done = engine.generate(requests, settings, 0, on_step)
    assert all(len(c.token_ids) == args.tokens for c in done.values())
    timed = ends[WARM : args.tokens - WARM - 1]  # before the objects are counted again
    steps = [after - before for before, after in itertools.pairwise(timed)]
    tokens = (args.tokens - 2 * WARM) * args.sequences
    record = {
        "host_ms": 1e3 * statistics.median(steps),
        "longest_ms": 1e3 * max(steps),
        "kernels_ms": 1e3 * clock.kernels / len(ends),
        "objects_per_token": (objects[args.tokens - WARM] - objects[WARM]) / tokens,
    }
    Path(args.result).write_text(json.dumps(record))


def command_line() -> argparse.Namespace:
    """Read the flags."""
    parser = parser_of(__doc__)
    parser.add_argument("--sequences", type=int, default=256, help="responses at once (256)")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each way (2)")
    add_engine_flags(parser, tokens=96)
    args = parser.parse_args()
    if args.tokens < 4 * WARM:
        parser.error(f"--tokens {args.tokens}: must be at least {4 * WARM}")
    return args


def launch(args: argparse.Namespace) -> None:
    """Run every way in processes of their own, and print the comparison."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with started(__file__, args.num_layers) as run:
        for _ in range(args.rounds):
            for way in WAYS:
                found[way].append(run(way))
    best = {way: min(runs, key=lambda run: run["host_ms"]) for way, runs in found.items()}
    rows = [["way", *best["ours"]]]
    rows += [[way, *(f"{value:.2f}" for value in run.values())] for way, run in best.items()]
    print("\n".join(aligned(rows)))
    ratio = best["baseline"]["host_ms"] / best["ours"]["host_ms"]
    print(f"baseline / ours, host: {ratio:.2f}")
    print_result("engine_steps", sequences=args.sequences, tokens=args.tokens, **best)


def main() -> None:
    """Start the processes, or run as one of them."""
    args = command_line()
    if args.model:
        measure(args)
    else:
        launch(args)


if __name__ == "__main__":
    main()
