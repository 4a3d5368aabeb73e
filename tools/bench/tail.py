"""Simulates how many decode slots are idle in rollouts with drawn lengths. Runs on one core.

    python tools/bench/tail.py --slots 128 32 --drafts 0.6 --cap 1.5

as drawn              prompts in the seed's order, samples divided in order
dealt, in order       samples divided by expected length, each engine starts them in order
dealt, longest first  and starts the longest expected first (--rollout-balance history)
dealt and moved       requests move as well (--rollout-rebalance all)
ordered               dealt, and epochs by expected length (--prompt-order by-length)
ordered and moved     all three
..., drafts           each step of a sequence gives 1 / S tokens (--drafts S, steps per token)
..., caps             ... and responses are capped (--cap F, --response-length-cap-factor)

Log-lengths are normal: a part of their variance is between prompts, the rest within a prompt. The
first epoch makes the history, the second is measured; all ways have the same samples. Order,
division, moves, costs and caps are the product's. A step of an engine takes the time of reading its
weights, more above --ridge tokens; a move costs its prefill; prompts are not counted. With --room
the cache of an engine holds so many tokens, and a request waits until there is room for its whole
response.

steps    time of a rollout in decode steps, mean over the epoch; in brackets over that as drawn
idle     share of the slots of all engines and of that time in which no token is sampled
floor    the same if engines could share the samples of each step at will: no response can be
         sampled faster than one token after the other
cut      share of the tokens that caps leave out, and of the responses that they cut

The last row is the floor of an epoch that is ordered by the lengths as they turn out to be. The
last line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401

from bench.jobs import parser_of, print_result
from mindspeed_rl.data.sampler import ByLength, LengthRanking, PromptSampler
from mindspeed_rl.generation.length_caps import LengthCaps
from mindspeed_rl.rollout.rebalance_plan import Load, Replica, StepCost, plan_moves, run_segment
from mindspeed_rl.samples.lengths import LengthHistory, assign_to_engines, longest_first

MIN_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class DrawnRollouts:
    """A run to simulate.

    Attributes:
        dataset: Number of prompts of an epoch.
        prompts: Number of prompts of a step.
        group: Samples per prompt.
        engines: Number of engines.
        slots: Sequences that an engine runs at once.
        mean: Mean length of responses before the limit cuts them.
        limit: Most tokens of a response.
        sigma: Standard deviation of the log-lengths.
        between: Part of their variance that is between prompts.
        ridge: Tokens that an engine computes in the time in which it reads its weights.
        interval: Steps between two points at which requests may move.
        cap_floor: Least tokens of a cap.
        room: Tokens that the cache of an engine holds; the default is never full.
        seed: Seed of lengths and order.
    """

    dataset: int = 1024
    prompts: int = 128
    group: int = 8
    engines: int = 8
    slots: int = 128
    mean: float = 3000.0
    limit: int = 8192
    sigma: float = 0.9
    between: float = 0.6
    ridge: int = 256
    interval: int = 256
    cap_floor: int = 1024
    room: int = 10**12
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Way:
    """How the samples of a run come to the slots of its engines.

    Attributes:
        name: Name of the row.
        dealt: Whether samples are divided by expected length.
        sorted: Whether engines start the longest expected first.
        ordered: Whether epochs are ordered by expected length.
        moved: Whether requests move.
        steps_per_token: Decode steps of a sequence per token.
        cap: Factor of the caps on responses; 0: none.
    """

    name: str
    dealt: bool = True
    sorted: bool = True
    ordered: bool = False
    moved: bool = False
    steps_per_token: float = 1.0
    cap: float = 0.0


@dataclass(slots=True)
class Measured:
    """Sums over the steps of the measured epoch; times in decode steps."""

    num_steps: int = 0
    time: float = 0.0
    floor: float = 0.0
    tokens: int = 0
    whole_tokens: int = 0
    responses: int = 0
    cut: int = 0
    order: list[int] = field(default_factory=list)


@cache
def lengths_of(case: DrawnRollouts, epoch: int, prompt: int) -> tuple[int, ...]:
    """Draw the lengths of the responses to a prompt in an epoch."""
    level = random.Random(f"{case.seed}/{prompt}").gauss(0.0, case.sigma * math.sqrt(case.between))
    rng = random.Random(f"{case.seed}/{prompt}/{epoch}")
    width, scale = case.sigma * math.sqrt(1 - case.between), case.mean / math.exp(case.sigma**2 / 2)
    drawn = (scale * math.exp(level + rng.gauss(0.0, width)) for _ in range(case.group))
    return tuple(max(1, min(case.limit, round(length))) for length in drawn)


def rollout_time(
    case: DrawnRollouts,
    way: Way,
    prompts: Sequence[int],
    lengths: Sequence[int],
    history: LengthHistory,
) -> float:
    """Return the time of a rollout, in units in which a sequence gives one token.

    Args:
        case: The run.
        way: How the samples are divided, and whether they move.
        prompts: Prompt of each sample.
        lengths: Length of each sample.
        history: Lengths of earlier steps.
    """
    # A step that gives several tokens of a sequence has computed at least as many.
    cost = StepCost(case.ridge * way.steps_per_token)
    shares = assign_to_engines(prompts, case.engines, history if way.dealt else None, case.limit)
    if way.sorted:
        shares = [
            longest_first(share, lambda i: history.expected(prompts[i], 0, case.limit))
            for share in shares
        ]
    engines = [
        Replica(tuple(Load(i, 0, lengths[i], False) for i in share), case.slots, case.room)
        for share in shares
    ]
    if not way.moved:
        return max(run_segment(engine, cost).time for engine in engines)
    time = 0.0
    while any(engine.loads for engine in engines):
        engines = _after_moves(case, engines, prompts, lengths, history, cost)
        parts = [run_segment(engine, cost, case.interval) for engine in engines]
        time += max(part.time for part in parts)
        engines = [Replica(part.rest, case.slots, case.room) for part in parts]
    return time


def _after_moves(
    case: DrawnRollouts,
    engines: Sequence[Replica],
    prompts: Sequence[int],
    lengths: Sequence[int],
    history: LengthHistory,
    cost: StepCost,
) -> list[Replica]:
    """Return the engines after the moves that the product plans from expected lengths."""

    def guessed(load: Load) -> Load:
        expected = history.expected(prompts[load.sample_id], load.context, case.limit)
        return replace(load, remaining=max(1, expected - load.context))

    known = [replace(e, loads=tuple(map(guessed, e.loads))) for e in engines]
    plan = plan_moves(known, cost, min_gain=MIN_GAIN, running=True)
    return [
        replace(
            e,
            loads=tuple(
                replace(load, remaining=lengths[load.sample_id] - load.context)
                for load in sorted(e.loads, key=lambda load: not load.computed)
            ),
        )
        for e in plan.replicas
    ]


def floor_time(case: DrawnRollouts, lengths: Sequence[int]) -> float:
    """Return the time in which the samples could be generated at best."""
    return max(max(lengths), math.ceil(sum(lengths) / (case.engines * case.slots)))


def steps_of(
    case: DrawnRollouts, way: Way, history: LengthHistory
) -> Iterator[tuple[int, list[int]]]:
    """Yield the epoch and the prompts of each step of two epochs."""
    ordering = ByLength(case.prompts, lambda: history.expected_lengths(case.dataset, case.limit))
    sampler = PromptSampler(case.dataset, case.seed, by_length=ordering if way.ordered else None)
    for epoch in (0, 1):
        for _ in range(case.dataset // case.prompts):
            yield epoch, sampler.next(case.prompts)


def measure(case: DrawnRollouts, way: Way) -> Measured:
    """Simulate two epochs, and measure the second."""
    history, found = LengthHistory(), Measured()
    caps = LengthCaps(way.cap, case.cap_floor, case.limit)
    for epoch, chosen in steps_of(case, way, history):
        whole = {p: lengths_of(case, epoch, p) for p in chosen}
        said = {
            p: [min(n, caps.cap(history.longest(p) if way.cap else None)) for n in whole[p]]
            for p in chosen
        }
        if epoch:
            prompts = [p for p in chosen for _ in said[p]]
            lengths = [n for p in chosen for n in said[p]]
            time = rollout_time(case, way, prompts, lengths, history)
            found.num_steps += 1
            found.time += time * way.steps_per_token
            found.floor += floor_time(case, lengths) * way.steps_per_token
            found.tokens += sum(lengths)
            found.whole_tokens += sum(map(sum, whole.values()))
            found.responses += len(lengths)
            found.cut += sum(a != b for p in chosen for a, b in zip(whole[p], said[p], strict=True))
            found.order += chosen
        history.observe(said)
    return found


def best_floor(case: DrawnRollouts, order: Sequence[int]) -> float:
    """Return the floor of an epoch whose prompts are sorted by their longest response."""
    longest = [max(lengths_of(case, 1, p)) for p in range(case.dataset)]
    ordered = LengthRanking(tuple(longest), case.prompts).order(case.seed, 1)
    steps = [ordered[i : i + case.prompts] for i in range(0, len(order), case.prompts)]
    return sum(
        floor_time(case, [n for p in step for n in lengths_of(case, 1, p)]) for step in steps
    )


def ways_of(drafts: float, cap: float) -> list[Way]:
    """Return the rows of a table."""
    ways = [
        Way("as drawn", dealt=False, sorted=False),
        Way("dealt, in order", sorted=False),
        Way("dealt, longest first"),
        Way("dealt and moved", moved=True),
        Way("ordered", ordered=True),
        Way("ordered and moved", ordered=True, moved=True),
    ]
    last = ways[-1]
    if drafts:
        last = replace(last, name="ordered, moved, drafts", steps_per_token=drafts)
        ways.append(last)
    if cap:
        ways.append(replace(last, name=last.name.replace(" and", ",") + ", caps", cap=cap))
    return ways


def table(case: DrawnRollouts, drafts: float, cap: float) -> dict[str, dict[str, float]]:
    """Simulate every way of a case; idle shares, times in decode steps of a rollout."""
    rows, first = {}, 0.0
    for way in ways_of(drafts, cap):
        found = measure(case, way)
        first = first or found.time
        slots = case.engines * case.slots / way.steps_per_token
        rows[way.name] = {
            "steps": found.time / found.num_steps,
            "relative": found.time / first,
            "idle": 1 - found.tokens / (slots * found.time),
            "floor": 1 - found.tokens / (slots * found.floor),
            "cut_tokens": 1 - found.tokens / found.whole_tokens,
            "cut_responses": found.cut / found.responses,
        }
        if len(rows) == 1:
            best = best_floor(case, found.order)
            idle = 1 - found.tokens / (case.engines * case.slots * best)
            limit = {"steps": best / found.num_steps, "relative": best / first, "floor": idle}
    return rows | {"floor of the best order": {**limit, "idle": idle, "cut_tokens": 0.0,
                                               "cut_responses": 0.0}}  # fmt: skip


def show(case: DrawnRollouts, rows: dict[str, dict[str, float]]) -> None:
    """Print the table of a case."""
    waves = case.prompts * case.group / (case.engines * case.slots)
    print(f"{case.engines} engines x {case.slots} slots, {waves:g} samples per slot")
    for name, row in rows.items():
        cut = f"   cut {row['cut_tokens']:.1%}, {row['cut_responses']:.1%}"
        print(
            f"  {name:28s}{row['steps']:8.0f} ({row['relative']:.2f})   idle {row['idle']:6.1%}"
            f"   floor {row['floor']:6.1%}" + (cut if row["cut_tokens"] else "")
        )


def parse() -> argparse.Namespace:
    """Return the arguments; all but the last three are the fields of a case."""
    parser = parser_of(__doc__)
    for name in ("dataset", "prompts", "group", "engines", "mean", "limit", "sigma", "between",
                 "ridge", "interval", "cap_floor", "room", "seed"):  # fmt: skip
        default = getattr(DrawnRollouts(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--slots", type=int, nargs="+", default=[128, 32])
    parser.add_argument("--drafts", type=float, default=0.0)
    parser.add_argument("--cap", type=float, default=0.0)
    return parser.parse_args()


def main() -> None:
    """Print a table for each number of slots."""
    given = vars(parse())
    slots, drafts, cap = (given.pop(name) for name in ("slots", "drafts", "cap"))
    tables = {}
    for number in slots:
        case = DrawnRollouts(slots=number, **given)
        tables[str(number)] = table(case, drafts, cap)
        show(case, tables[str(number)])
    print_result("tail", drafts=drafts, cap=cap, **given, slots=tables)


if __name__ == "__main__":
    main()
