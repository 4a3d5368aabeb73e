"""A run on one page: ``report.html``, a single file that needs no network and no server."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from mindspeed_rl.config.outputs import METRICS_FILE, ROLLOUTS_FILE, SUMMARY_FILE
from mindspeed_rl.observability import names
from mindspeed_rl.observability.curves import Record, Series, draw_run
from mindspeed_rl.observability.files import write_text_atomic
from mindspeed_rl.observability.jsonl import read_jsonl

NUM_SAMPLES = 5  # shown of the best and of the worst
MAX_TEXT_CHARS = 4000
_DPI = 72
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em;
  color: #222; }
img { max-width: 100%; } h2 { border-bottom: 1px solid #ccc; margin-top: 2em; }
table { border-collapse: collapse; } td, th { padding: .15em 1em .15em 0; text-align: left;
  vertical-align: top; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f5f5f5; padding: .6em; white-space: pre-wrap; overflow-wrap: anywhere;
  margin: .2em 0 1em; } .sample { border-left: 4px solid #bbb; padding-left: 1em; }
"""
# Nothing is loaded and no script runs, whatever a sample says.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(output_dir: str | os.PathLike[str], out_html: str | os.PathLike[str]) -> None:
    """Writes the page from what the run has written so far; it may be unfinished or resumed.

    Of several records of one step the last one counts.

    Args:
        output_dir: folder of the run, with ``metrics.jsonl`` and, if any were sampled,
            ``rollouts.jsonl``.
        out_html: the page; replaced in one step.

    Raises:
        ValueError: there is no ``metrics.jsonl``, or a line of a file is not a record.
    """
    folder = Path(output_dir)
    metrics = folder / METRICS_FILE
    if not metrics.exists():
        raise ValueError(f"{metrics} does not exist; give the output folder of a run")
    records = list(read_jsonl(metrics))
    samples = latest_samples(list(read_jsonl(folder / ROLLOUTS_FILE)))
    summary = folder / SUMMARY_FILE
    finished = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    title = folder.resolve().name
    write_text_atomic(out_html, render(title, records, samples, finished))


def latest_samples(rows: Sequence[Record]) -> list[Record]:
    """One row per step and sample: the last that was written."""
    return list({(row["step"], row.get("sample_id")): row for row in rows}.values())


def render(
    title: str,
    records: Sequence[Record],
    samples: Sequence[Record],
    summary: Mapping[str, Any],
) -> str:
    """The page as text."""
    sections = [_summary(records, summary), _curves(records, title)]
    sections += [
        _section(heading, _image(_panels(records, panels)))
        for heading, panels in (
            ("Rewards and lengths", [_reward_spread, _length_spread]),
            ("Evaluation", [_accuracy_by_set, _pass_at_k]),
            ("Memory by owner", [_memory("rollout"), _memory("train")]),
        )
    ]
    sections += [
        _samples("Best samples", samples, best=True),
        _samples("Worst samples", samples, best=False),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _section(heading: str, body: str) -> str:
    return f"<h2>{html.escape(heading)}</h2>\n{body}"


def _summary(records: Sequence[Record], summary: Mapping[str, Any]) -> str:
    """The summary of a finished run, or the last values of one that is not."""
    rows = dict(summary)
    note = ""
    if not summary:
        note = "<p>The run has not finished: no summary yet. Its last values:</p>"
        shown = (*names.HEADLINE, names.ACCURACY, names.EVAL_REWARD)
        series = {name: Series.of(records, name) for name in shown}
        rows = {name: float(s.values[-1]) for name, s in series.items() if len(s.steps)}
    steps = sorted({record["step"] for record in records})
    if steps:
        rows = {"logged steps": f"{steps[0]} to {steps[-1]}"} | rows
    lines = "".join(
        f'<tr><th>{html.escape(str(name))}</th><td class="n">{html.escape(_text(value))}</td></tr>'
        for name, value in rows.items()
        if value is not None and name != "nonfinite"
    )
    return f"{note}<table>{lines}</table>"


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _curves(records: Sequence[Record], title: str) -> str:
    return _section("Curves", _image(draw_run(records, title)))


def _image(figure: Figure) -> str:
    """As a PNG within the page: its size does not grow with the steps, as that of an SVG would."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img alt="" src="data:image/png;base64,{data}">'


Panel = Callable[[Axes, Sequence[Record]], bool]
"""Draws; returns whether there was anything to draw."""


def _panels(records: Sequence[Record], panels: Sequence[Panel]) -> Figure:
    figure = Figure(figsize=(16, 4.5), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for axis, draw in zip(np.atleast_1d(axes), panels, strict=True):
        if not draw(axis, records):
            axis.text(0.5, 0.5, "not logged", transform=axis.transAxes, ha="center", color="gray")
            axis.set_yticks([])
        axis.set_xlabel("training step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(visible=True, alpha=0.25)
    return figure


def _spread(axis: Axes, records: Sequence[Record], prefix: str, unit: str) -> bool:
    """Mean and median in a band of the middle 80 %, in one from smallest to largest."""
    parts = {q: Series.of(records, f"{prefix}{q}") for q in ("min", "p10", "p50", "p90", "max")}
    axis.set_ylabel(unit)
    if parts["p50"].is_empty:
        return False
    for low, high, alpha, label in (
        ("min", "max", 0.15, "smallest to largest"),
        ("p10", "p90", 0.3, "middle 80 %"),
    ):
        lower, upper = parts[low], parts[high]
        if len(lower.steps) == len(upper.steps):
            axis.fill_between(
                lower.steps, lower.values, upper.values, color="C0", alpha=alpha, label=label, lw=0
            )
    axis.plot(parts["p50"].steps, parts["p50"].values, color="C0", label="median", marker=".")
    mean = Series.of(records, f"{prefix}mean")
    axis.plot(mean.steps, mean.values, color="C1", label="mean")
    axis.legend(framealpha=0.7, loc="upper left", ncol=2, fontsize=8)
    return True


def _reward_spread(axis: Axes, records: Sequence[Record]) -> bool:
    axis.set_title("Rewards of the samples of a step")
    return _spread(axis, records, "reward/", "reward")


def _length_spread(axis: Axes, records: Sequence[Record]) -> bool:
    axis.set_title("Lengths of the responses of a step")
    return _spread(axis, records, "response/length_", "tokens")


def _lines(axis: Axes, records: Sequence[Record], wanted: Callable[[str], bool]) -> bool:
    found = dict.fromkeys(name for record in records for name in record if wanted(name))
    drawn = False
    for name in found:
        series = Series.of(records, name)
        if not series.is_empty:
            axis.plot(series.steps, series.values, marker=".", label=name.removeprefix("eval/"))
            drawn = True
    if drawn:
        axis.legend(frameon=False, fontsize=8)
    axis.set_ylim(0, 1.05)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    return drawn


def _accuracy_by_set(axis: Axes, records: Sequence[Record]) -> bool:
    axis.set_title("Right greedy responses, by set")
    return _lines(axis, records, lambda name: name.endswith("accuracy_lenient"))


def _pass_at_k(axis: Axes, records: Sequence[Record]) -> bool:
    axis.set_title("Right sampled responses")
    return _lines(axis, records, lambda name: "/pass@" in name or "/mean@" in name)


def _memory(state: str) -> Panel:
    prefix = f"memory/{state}/"

    def draw(axis: Axes, records: Sequence[Record]) -> bool:
        axis.set_title(f"Fullest rank while it is in {state}")
        axis.set_ylabel("bytes")
        found = dict.fromkeys(
            name for record in records for name in record if name.startswith(prefix)
        )
        series = {name: Series.of(records, name) for name in found}
        series = {name: s for name, s in series.items() if np.nansum(s.values) > 0}
        if not series:
            return False
        steps = np.array(sorted({int(step) for s in series.values() for step in s.steps}))
        layers = []
        for one in series.values():
            dense = np.zeros(len(steps))
            dense[np.searchsorted(steps, one.steps)] = np.nan_to_num(one.values)
            layers.append(dense)
        labels = [name.removeprefix(prefix).removesuffix("_bytes") for name in series]
        colors = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
        if len(steps) == 1:  # an area over one step has no width
            bottom = 0.0
            for color, label, layer in zip(colors, labels, layers, strict=False):
                axis.bar(steps, layer, bottom=bottom, width=0.4, label=label, color=color)
                bottom += float(layer[0])
        else:
            axis.stackplot(steps, layers, labels=labels, colors=colors)
        axis.yaxis.set_major_formatter(EngFormatter(sep=""))
        axis.legend(frameon=False, fontsize=8, loc="upper left")
        return True

    return draw


def _samples(heading: str, samples: Sequence[Record], *, best: bool) -> str:
    """Of the last third of the sampled steps: what the model does now, not how it began."""
    known = [s for s in samples if isinstance(s.get("reward"), int | float)]
    if not known:
        return _section(heading, "<p>No samples with a reward in rollouts.jsonl.</p>")
    steps = sorted({s["step"] for s in known})
    since = steps[-math.ceil(len(steps) / 3)]
    late = [s for s in known if s["step"] >= since]
    late.sort(key=lambda s: s["reward"], reverse=best)
    return _section(heading, "\n".join(_sample(s) for s in late[:NUM_SAMPLES]))


def _sample(row: Record) -> str:
    parts = ", ".join(f"{name} {_text(value)}" for name, value in row.get("parts", {}).items())
    facts = (
        f"step {row['step']}, sample {row.get('sample_id')}, reward {_text(row['reward'])}"
        f"{f' ({parts})' if parts else ''}, ended by {row.get('finish_reason')}, "
        f"answer {row.get('answer')}"
    )
    return (
        f'<div class="sample"><p>{html.escape(facts)}</p>'
        f"<pre>{html.escape(_cut(row.get('prompt')))}</pre>"
        f"<pre>{html.escape(_cut(row.get('response')))}</pre></div>"
    )


def _cut(value: Any) -> str:
    text = str(value)
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"
