"""Runs the score command on every model and layout and prints the tables of docs/models.md.

usage: PYTHONPATH=. python tests/score_table.py [--backend engine] [--variants NAME ...]
           [--layouts NAME ...] [--all] [--together] [--by-family] [--launcher torchrun]
           [--results FILE]

A cell holds the largest difference of a log-prob and of an entropy from transformers in fp32, in
nats. Models and layouts are those of tests/support/score_cases.py: enough for every pair of
choices, with --all every layout that fits. Ends with 1 when a difference is above the limit or a
run fails. With --results the numbers that the file holds are not measured again, so that a table
can be made in portions. With --together the trainer scores all models of a layout in one world;
with --by-family a cell holds the worst of a family's models in a layout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from support.score_cases import BACKENDS, VARIANTS, ScoreLayout, layouts_of
from support.score_runs import LAUNCHERS, TOLERANCE, ScoreWorld

from mindspeed_rl.metrics.progress import RunProgress

# backend, variant, layout
Run = tuple[str, str, ScoreLayout]
# the same as text -> log-prob, entropy, or why there is none
Results = dict[str, list[float] | str]


def key_of(run: Run) -> str:
    """Of a run in the results."""
    backend, variant, layout = run
    return f"{backend}/{variant}/{layout.name}"


def chosen_runs(args: argparse.Namespace) -> list[Run]:
    """What the arguments ask for.

    Raises:
        ValueError: nothing, or a name that is none.
    """
    runs: list[Run] = [
        (backend, variant, layout)
        for backend in args.backend
        for variant, layouts in layouts_of(backend, everything=args.all).items()
        for layout in layouts
    ]
    for flag, names, place in (("--variants", args.variants, 1), ("--layouts", args.layouts, 2)):
        known = dict.fromkeys(run[1] if place == 1 else run[2].name for run in runs)
        if unknown := sorted(set(names) - set(known)):
            raise ValueError(f"{flag} {unknown[0]}: allowed are {', '.join(known)}")
    return [
        run
        for run in runs
        if run[1] in (args.variants or VARIANTS)
        and (not args.layouts or run[2].name in args.layouts)
    ]


def batches(runs: Sequence[Run], *, together: bool) -> list[list[Run]]:
    """What is run in one world: each alone, or the trainer's runs of a layout together."""
    found: dict[object, list[Run]] = {}
    for run in runs:
        backend, _, layout = run
        key = layout.name if together and backend == "megatron" else run
        found.setdefault(key, []).append(run)
    return list(found.values())


def measure(batch: Sequence[Run], world: ScoreWorld) -> Results:
    """Of one world; where several together fail, each by itself, so that none hides the others."""
    backend, _, layout = batch[0]
    if len(batch) > 1:
        try:
            found = world.differences([variant for _, variant, _ in batch], layout)
            return {key_of(run): [found[run[1]].logp, found[run[1]].entropy] for run in batch}
        except AssertionError as error:
            print(f"\n{layout.name}, together: {error}", file=sys.stderr, flush=True)
            return {key: value for run in batch for key, value in measure([run], world).items()}
    ((_, variant, _),) = batch
    try:
        one = world.difference(variant, backend, layout)
    except AssertionError as error:
        print(f"\n{key_of(batch[0])}: {error}", file=sys.stderr, flush=True)
        return {key_of(batch[0]): str(error)}
    return {key_of(batch[0]): [one.logp, one.entropy]}


def run_all(runs: Sequence[Run], world: ScoreWorld, args: argparse.Namespace) -> Results:
    """Whatever the results lack and the time allows."""
    results: Results = json.loads(args.results.read_text()) if args.results.exists() else {}
    missing = [run for run in runs if not isinstance(results.get(key_of(run)), list)]
    ends = time.monotonic() + args.limit_s
    progress = RunProgress(len(missing), 0, "score", is_writer=True)
    done = 0
    for batch in batches(missing, together=args.together):
        if time.monotonic() < ends:
            results |= measure(batch, world)
            args.results.write_text(json.dumps(results, indent=1))
            done += len(batch)
            progress.update(done, {})
    progress.close()
    return results


def cell(runs: Iterable[Run], results: Results) -> str:
    """The runs of a variant in one column: layouts beside the column's name, and their numbers."""
    parts = []
    for run in runs:
        rest = run[2].name.removeprefix(run[2].column).strip()
        value = results.get(key_of(run), "not run")
        shown = "failed" if isinstance(value, str) and value != "not run" else value
        if not isinstance(shown, str):
            shown = ", ".join(f"{number:.0e}".replace("e-0", "e-") for number in shown)
        parts.append(f"{rest}: {shown}" if rest else shown)
    return "; ".join(parts)


def table(backend: str, runs: Sequence[Run], results: Results) -> str:
    """Markdown: a row per variant, a column per split of the trainer or layout of the engine."""
    places: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run[0] == backend:
            places.setdefault((run[1], run[2].column), []).append(run)
    variants, columns = (list(dict.fromkeys(place[i] for place in places)) for i in (0, 1))
    rows: list[list[str]] = [["model", *columns]]
    rows += [[v, *(cell(places.get((v, c), []), results) for c in columns)] for v in variants]
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([f"--backend {backend}", "", head, "|" + "---|" * (len(columns) + 1), *body])


def family_table(backend: str, runs: Sequence[Run], results: Results) -> str:
    """Markdown: a row per layout, a column per family; the worst of the family's models."""
    names = list(dict.fromkeys(layout.name for b, _, layout in runs if b == backend))
    families = list(dict.fromkeys(VARIANTS[v].family for b, v, _ in runs if b == backend))
    rows = [["layout", *families]]
    for name in names:
        row = [name]
        for family in families:
            values = [
                results.get(key_of(run), "not run")
                for run in runs
                if run[0] == backend and run[2].name == name and VARIANTS[run[1]].family == family
            ]
            numbers = [value for value in values if not isinstance(value, str)]
            worst = [f"{max(n[i] for n in numbers):.0e}".replace("e-0", "e-") for i in (0, 1)
                     if numbers]  # fmt: skip
            missing = len(values) - len(numbers)
            row.append(", ".join([*worst, *([f"{missing} lack"] if missing else [])]))
        rows.append(row)
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([f"--backend {backend}", "", head, "|" + "---|" * len(rows[0]), *body])


def wrong(runs: Sequence[Run], results: Mapping[str, list[float] | str]) -> list[str]:
    """Runs that failed, were not run, or differ too much."""
    found = []
    for run in runs:
        value = results.get(key_of(run), "not run")
        if isinstance(value, str):
            found.append(f"{key_of(run)}: {value.splitlines()[0]}")
        elif not all(number <= TOLERANCE for number in value):
            numbers = ", ".join(f"{number:.1e}" for number in value)
            found.append(f"{key_of(run)}: {numbers} nats, allowed {TOLERANCE:g}")
    return found


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--variants", nargs="+", default=[], help="Default: all.")
    parser.add_argument("--layouts", nargs="+", default=[], help="Default: all.")
    parser.add_argument("--all", action="store_true", help="Every layout that fits.")
    parser.add_argument("--together", action="store_true", help="Trainer: one world per layout.")
    parser.add_argument("--by-family", action="store_true", help="Print the worst of a family.")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="warm")
    parser.add_argument("--results", type=Path, help="JSON file to go on with.")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="No run begins later.")
    parser.add_argument("--list", action="store_true", help="Print the runs, and end.")
    return parser.parse_args()


def quiet() -> None:
    """No bars of transformers between ours, no warnings of libraries here and in the ranks."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")


def main() -> int:
    """The exit status."""
    args = arguments()
    quiet()
    try:
        runs = chosen_runs(args)
    except ValueError as error:
        print(f"score_table: error: {error}", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(map(key_of, runs)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        args.results = args.results or Path(folder) / "results.json"
        results = run_all(runs, ScoreWorld(Path(folder), LAUNCHERS[args.launcher]), args)
    shown = family_table if args.by_family else table
    print("\n\n".join(shown(backend, runs, results) for backend in args.backend))
    found = wrong(runs, results)
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
