"""The page of a run's responses: complete, bounded, and safe against what models write."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts_page import main

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.metrics import rollouts_page
from mindspeed_rl.metrics.rollouts_page import kept_steps, write_page


def row(step: int, **changes: Any) -> dict[str, Any]:
    base = {
        "step": step, "reward": 0.5, "sample_id": 3, "group": 1, "prompt": "q", "prompt_text": "q:",
        "response": "a", "answer": "b", "length": 1, "finish_reason": "stop", "parts": {"math": 1},
        "advantage": -1.5, "pieces": ["a"], "mismatch": [1e-5], "response_ids": [1, 2, 3],
    }  # fmt: skip
    return base | changes


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text()
    begin = text.index(">", text.index('id="data"')) + 1
    found: dict[str, Any] = json.loads(text[begin : text.index("</script>", begin)])
    return found


def test_the_page_has_training_and_evaluations_without_token_ids(tmp_path: Path) -> None:
    write(tmp_path, "rollouts.jsonl", [row(1), row(2, reward=None)])
    write(tmp_path, "evaluations.jsonl", [row(0, set="gsm8k", kind="greedy")])
    flags = {"--hf-checkpoint": "/models/Qwen2.5-7B", "--rl-advantage-estimator": "rloo"}
    (tmp_path / "config.json").write_text(json.dumps({"flags": flags, "started": "2026-01-02"}))
    found = data_of(write_page(tmp_path))
    assert found["title"] == "models/Qwen2.5-7B, rloo: rollouts"
    assert found["about"].endswith("started 2026-01-02")
    assert [(r["step"], r.get("set"), r["reward"]) for r in found["rows"]] == [
        *((1, None, 0.5), (2, None, None), (0, "gsm8k", 0.5))
    ]
    assert "response_ids" not in found["rows"][0] and found["rows"][0]["mismatch"] == [1e-5]


@pytest.mark.parametrize(
    "text", ["</script><script>alert(1)</script>", "<!--<script>", "/*DATA*/", "\ud800", "\u2028"]
)
def test_no_response_leaves_its_place(tmp_path: Path, text: str) -> None:
    write(tmp_path, "rollouts.jsonl", [row(1, response=text)])
    page = write_page(tmp_path)
    (found,) = data_of(page)["rows"]
    assert found["response"] == text.replace("\ud800", "?")
    assert page.read_text().count("<script") == 2


def test_a_page_of_a_long_run_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts_page, "MOST_BYTES", 40_000)
    write(tmp_path, "rollouts.jsonl", [row(s, response="x" * 900) for s in range(1, 201)])
    page = write_page(tmp_path, tmp_path / "other.html")
    found = data_of(page)
    steps = [r["step"] for r in found["rows"]]
    assert steps[-1] == 200 and len({b - a for a, b in pairwise(steps)}) == 1
    assert 20 < len(steps) < 40 and f"{len(steps)} of 200 responses" in found["about"]
    assert page.stat().st_size < 40_000 + 25_000


@given(
    st.dictionaries(st.integers(0, 10**6), st.integers(1, 10**6), min_size=1), st.integers(1, 10**7)
)
def test_the_last_step_is_always_there(sizes: dict[int, int], most: int) -> None:
    kept = kept_steps(sizes, most)
    assert max(sizes) in kept and kept <= set(sizes)
    assert len(kept) == 1 or sum(sizes[s] for s in kept) <= most
    if sum(sizes.values()) <= most:
        assert kept == set(sizes)


def test_long_texts_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts_page, "MOST_CHARACTERS", 10)
    turns = [{"by": "model", "text": "y" * 12}]
    write(tmp_path, "rollouts.jsonl", [row(1, response="x" * 25, turns=turns)])
    (found,) = data_of(write_page(tmp_path))["rows"]
    assert found["response"] == "x" * 10 + " [... 15 characters more]"
    assert found["turns"][0]["text"] == "y" * 10 + " [... 2 characters more]"


def test_a_run_without_responses_has_a_page_that_says_so(tmp_path: Path) -> None:
    assert data_of(write_page(tmp_path))["rows"] == []


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text("{\n")
    with pytest.raises(UsageError, match=r"rollouts\.jsonl, line 1: not JSON"):
        write_page(tmp_path)


def test_the_command_names_what_it_wrote_and_what_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "rollouts.jsonl", [row(1)])
    assert main([str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path}/page.html\n"
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "no such folder; give the --output-dir of a run" in capsys.readouterr().err


in_a_browser = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs the browser chromium"
)


PHONE = "--window-size=500,844"  # the narrowest window of a headless chromium


def shown(page: Path, state: str = "", script: str = "", *options: str) -> tuple[str, str]:
    """List and opened response of the page in a browser, after a script."""
    text = page.read_text().replace("</body>", f"<script>{script}</script></body>")
    page.write_text(text)
    command = [
        "chromium",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        *options,
    ]
    address = f"file://{page}#{state}"
    done = subprocess.run([*command, address], capture_output=True, text=True, timeout=120)
    body = done.stdout[done.stdout.index("<main>") : done.stdout.index('id="data"')]
    listed, _, opened = body.partition('id="detail"')
    return listed, opened


@in_a_browser
def test_a_browser_shows_the_filtered_rows(tmp_path: Path) -> None:
    rows = [row(s, reward=s / 10, prompt=f"question {s}", group=s) for s in range(1, 10)]
    write(tmp_path, "rollouts.jsonl", rows)
    listed, opened = shown(write_page(tmp_path), "step0=3&reward1=0.7&order=low&at=4")
    assert "5 of 9 responses" in listed and "question 3" in listed
    assert "question 8" not in listed + opened
    assert listed.index("question 3") < listed.index("question 7")
    assert "question 5" in listed and "question 5" in opened
    assert "log p" not in opened and "Largest |difference| 1.00e-5" in opened


@in_a_browser
def test_filters_that_leave_nothing_leave_no_response_open(tmp_path: Path) -> None:
    """By typing as by an address; with other filters a response of the list is open again."""
    rows = [row(s, prompt=f"question {s}", group=s) for s in range(1, 4)]
    write(tmp_path, "rollouts.jsonl", rows)
    event = 'new Event("input", {bubbles: true})'
    typed = f'form.text.value = "TEXT"; form.text.dispatchEvent({event});'
    nothing = typed.replace("TEXT", "elephant")
    for state, script in (("", nothing), ("text=elephant", "")):
        listed, opened = shown(write_page(tmp_path), state, script)
        assert "0 of 3 responses: none matches the filters" in listed
        assert "No response matches the filters. Widen one, or press Clear." in opened
        assert "question" not in listed + opened
    again = nothing + typed.replace("TEXT", "question 2")
    listed, opened = shown(write_page(tmp_path), "", again)
    assert "1 of 3 responses" in listed and "none matches" not in listed
    assert "question 2" in opened and "question 3" not in opened and "No response" not in opened


@in_a_browser
def test_a_browser_says_that_the_run_kept_no_responses(tmp_path: Path) -> None:
    listed, opened = shown(write_page(tmp_path))
    assert "0 of 0 responses" in listed and "none matches" not in listed
    assert "The run kept no responses (--log-rollouts)." in opened


@in_a_browser
def test_a_reward_is_found_by_the_number_that_is_shown(tmp_path: Path) -> None:
    """0.9 in fp32 is less than 0.9, and 0.171 stands for 0.1714."""
    rewards = {"below": 0.85, "fp32": 0.8999999761581421, "above": 0.95, "small": 0.1714}
    write(tmp_path, "rollouts.jsonl", [row(1, reward=x, prompt=p) for p, x in rewards.items()])
    for state, expected in (
        ("reward0=0.9&reward1=0.9", {"fp32"}),
        ("reward1=0.171", {"small"}),
        ("reward0=0.1714&reward1=0.1714", {"small"}),
        ("reward0=0.9", {"fp32", "above"}),
    ):
        listed, _ = shown(write_page(tmp_path), state)
        assert {prompt for prompt in rewards if prompt in listed} == expected, state


@in_a_browser
def test_the_list_has_only_the_beginnings_of_long_texts(tmp_path: Path) -> None:
    """Thousands of characters in each of its lines would make every filter slow."""
    write(tmp_path, "rollouts.jsonl", [row(s, response="abcd " * 3000) for s in range(5)])
    listed, opened = shown(write_page(tmp_path))
    assert 5 * 30 < listed.count("abcd") < 5 * 50 and opened.count("abcd") == 3000


@in_a_browser
def test_values_behind_long_names_are_on_the_screen_of_a_phone(tmp_path: Path) -> None:
    name = "rewards_of_my_project.py:" + "a_long_name_of_a_reward_function_" * 4
    write(tmp_path, "rollouts.jsonl", [row(1, parts={name: 0.25})])
    script = """const right = Math.max(...[...document.querySelectorAll("td")].map(
        cell => cell.getBoundingClientRect().right));
        detail.append(right > 0 && right <= innerWidth ? "all are seen" : "cut off");"""
    _, opened = shown(write_page(tmp_path), "at=0", script, PHONE)
    assert "all are seen" in opened


@in_a_browser
def test_on_a_phone_a_response_is_left_for_the_list(tmp_path: Path) -> None:
    """An address names the response that covers the list, and none when the list is seen."""
    write(tmp_path, "rollouts.jsonl", [row(s, prompt=f"question {s}") for s in range(1, 4)])
    say = "list.append(` [${view} ${location.hash} ${history.state}]`);"
    choose = 'list.querySelectorAll("button")[1].click();'
    back = 'document.getElementById("back").click();'
    for state, script, expected in (
        ("", say, "[ #order=newest null]"),
        ("", choose + say, "[reading #order=newest&amp;at=1 reading]"),
        ("order=low&at=2", say, "[reading #order=low&amp;at=2 null]"),
        ("order=low&at=2", back + say, "[ #order=low null]"),
    ):
        listed, _ = shown(write_page(tmp_path), state, script, PHONE)
        assert expected in listed


@in_a_browser
def test_tokens_that_were_only_read_look_different(tmp_path: Path) -> None:
    pieces = {"pieces": ["one", "two"], "mismatch": [0.0, None], "length": 1, "read": 1}
    write(tmp_path, "rollouts.jsonl", [row(1, **pieces)])
    _, opened = shown(write_page(tmp_path))
    assert '<span>one</span><span class="read">two</span>' in opened and "1 token<" in opened
