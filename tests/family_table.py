"""Measures every family in every layout and prints the table of docs/models.md.

usage: PYTHONPATH=. python tests/family_table.py

The worlds are those of tests/distributed/test_families.py. A cell holds the largest difference of a
log-prob from transformers in fp64, in nats, and the largest relative error (norm-wise, per
parameter) of a gradient: on one rank against transformers, elsewhere against one rank.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from distributed.test_families import COMMON, LAYOUTS, largest, worst_gradient
from support.family_models import FAMILY_CASES, VOCAB, family_reference, write_family_model
from support.spawn import run_ranks
from support.training_worlds import Case, WorldResult, make_samples, train_world


def run_layout(name: str, models: dict[str, Path], work_dir: Path) -> WorldResult:
    """All models that fit a layout, in one world."""
    layout = LAYOUTS[name]
    cases = [Case(m, (), "sft", model=str(models[m])) for m in layout.models()]
    work_dir.mkdir()
    args = ([*layout.flags, *COMMON], cases, cases[0].model, make_samples(VOCAB))
    result: WorldResult = run_ranks(train_world, layout.num_ranks, work_dir=work_dir, args=args)[0]
    return result


def markdown(rows: Iterable[Iterable[str]]) -> str:
    """Rows of a table; the first one is its head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * (len(LAYOUTS) + 1), *body])


def main() -> None:
    """Run everything, print one table."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        models = {n: write_family_model(c, root / n) for n, c in FAMILY_CASES.items()}
        references = {n: family_reference(models[n], make_samples(VOCAB)) for n in models}
        worlds = {}
        for name in LAYOUTS:
            worlds[name] = run_layout(name, models, root / f"world-{name}")
            print(f"{name}: done", file=sys.stderr, flush=True)
    rows = [["model", *LAYOUTS]]
    for model in models:
        row = [model]
        for name, world in worlds.items():
            if model not in world.cases:
                row.append("")
                continue
            found = world.cases[model]
            wanted = worlds["one"].cases[model].gradients
            if name == "one":
                wanted = {n: g.float() for n, g in references[model].gradients.items()}
            held = {n: found.gradients[n] for n in wanted}
            logprob = largest(found.logprobs, references[model].logprobs)
            row.append(f"{logprob:.0e}, {worst_gradient(held, wanted)[0]:.0e}")
        rows.append(row)
    print(markdown(rows))


if __name__ == "__main__":
    main()
