"""The page of a run: complete, readable offline, safe whatever a sample says."""

from __future__ import annotations

import json
import math
import re
import runpy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.observability.html_report import MAX_TEXT_CHARS, latest_samples, write_report
from mindspeed_rl.observability.jsonl import JsonlWriter

EVIL = "<script>alert(1)</script><img src=http://x.y/z> & \" ' </pre>"


class Page(HTMLParser):
    """Text and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for key, value in attrs if key in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def write_run(folder: Path, steps: int, *, long: int = 0) -> None:
    metrics = JsonlWriter(folder / "metrics.jsonl")
    rollouts = JsonlWriter(folder / "rollouts.jsonl")
    for step in range(1, steps + 1):
        value = step / steps
        spread = {f"reward/{q}": value for q in ("min", "p10", "p50", "p90", "max")}
        lengths = {f"response/length_{q}": 9.0 * value for q in ("min", "p10", "p50", "p90", "max")}
        metrics.append(
            step,
            {
                "reward/mean": value, "mismatch/max_abs_logprob": 1e-6, "time/step_s": 2.0,
                "time/generate_s": 1.0, "memory/rollout/kv_cache_bytes": 1e6 * step,
                "memory/train/parameters_bytes": 2e6, **spread, **lengths,
            },
        )  # fmt: skip
        metrics.append(step, {"eval/accuracy_lenient": value, "eval/x/pass@4": value})
        for i in range(4):
            row: dict[str, Any] = {
                "sample_id": i, "prompt": f"question {step}/{i} {EVIL}", "answer": "<b>4</b>",
                "response": f"response {step}/{i} {EVIL}" + "x" * long, "reward": i + value,
                "finish_reason": "stop", "parts": {"math": 1.0},
            }  # fmt: skip
            rollouts.append(step, row)
    metrics.close()
    rollouts.close()


def page_of(folder: Path) -> Page:
    write_report(folder, folder / "report.html")
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_one_file_with_everything_in_it(tmp_path: Path) -> None:
    write_run(tmp_path, 9, long=20_000)
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 9, "seed": 1, "x": None}))
    page = page_of(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 2 << 20
    assert page.tags.count("img") == 4
    assert all(s.startswith("data:image/png;base64,") and len(s) > 5000 for s in page.sources)
    assert not {"script", "link", "iframe", "b"} & set(page.tags)
    text = "".join(page.texts)
    for heading in ("Curves", "Rewards and lengths", "Evaluation", "Memory by owner"):
        assert heading in page.texts
    assert f"question 9/3 {EVIL}" in text, "escaped, so that it reads as it was written"
    assert "characters left out" in text and "x" * MAX_TEXT_CHARS not in text
    assert "1 to 9" in text and "seed" in text


def test_best_and_worst_are_of_the_last_third(tmp_path: Path) -> None:
    write_run(tmp_path, 9)
    text = "".join(page_of(tmp_path).texts)
    best, worst = text.split("Best samples")[1].split("Worst samples")
    assert re.findall(r"response (\d/\d)", best) == ["9/3", "8/3", "7/3", "9/2", "8/2"]
    assert re.findall(r"response (\d/\d)", worst) == ["7/0", "8/0", "9/0", "7/1", "8/1"]


def test_an_unfinished_run_is_drawn_as_far_as_it_got(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/me')  # killed while writing
    page = page_of(tmp_path)
    text = "".join(page.texts)
    assert "has not finished" in text and "1 to 2" in text
    empty = tmp_path / "empty"
    JsonlWriter(empty / "metrics.jsonl").append(0, {"eval/reward": math.nan})
    assert "No samples with a reward" in "".join(page_of(empty).texts)
    with pytest.raises(ValueError, match=r"metrics\.jsonl does not exist"):
        write_report(tmp_path / "nothing", tmp_path / "x.html")


def test_a_resumed_run_counts_every_step_and_sample_once(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "sample_id": 0, "reward": 0.0},
        {"step": 2, "sample_id": 0, "reward": 1.0},
        {"step": 2, "sample_id": 0, "reward": 5.0},
    ]
    assert [r["reward"] for r in latest_samples(rows)] == [0.0, 5.0]
    metrics = JsonlWriter(tmp_path / "metrics.jsonl")
    for step, value in ((1, 0.25), (2, 0.5), (2, 0.75)):
        metrics.append(step, {"reward/mean": value})
    metrics.close()
    text = "".join(page_of(tmp_path).texts)
    assert "0.75" in text and "0.5" not in text


@pytest.mark.slow
def test_the_tool_draws_an_unfinished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, 2)
    tool = Path(__file__).resolve().parents[2] / "tools" / "plot_run.py"
    monkeypatch.setattr("sys.argv", ["plot_run.py", str(tmp_path)])
    runpy.run_path(str(tool), run_name="__main__")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert "has not finished" in (tmp_path / "report.html").read_text()
    monkeypatch.setattr("sys.argv", ["plot_run.py", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tool), run_name="__main__")
    assert ended.value.code == 2
