"""How far a pass of generation is: lines at intervals in a file, a bar on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import sys

import pytest

from mindspeed_rl.metrics.generation_progress import LINE_S, GenerationProgress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_file_gets_a_line_at_most_every_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = io.StringIO(), _Clock()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = GenerationProgress("generating", 64, 8, clock=clock)
    for _ in range(12):  # of 10 s, with a response in each
        clock.now += LINE_S / 3
        progress.add(1)
    progress.close()
    lines = [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]
    assert lines == [
        f"generating {done}/64 on the first of 8 engines, {done * LINE_S / 3:.0f} s"
        for done in (3, 6, 9, 12)
    ]


def test_a_pass_of_seconds_says_nothing_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = io.StringIO(), _Clock()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = GenerationProgress("evaluating", 2, clock=clock)
    clock.now += LINE_S - 1
    progress.add(2)
    assert stream.getvalue() == ""
    clock.now += 2
    progress.add(1)  # one that another engine began
    assert re.fullmatch(r"\d\d:\d\d:\d\d evaluating 3/3, 31 s\n", stream.getvalue())


def test_a_terminal_has_a_bar_that_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = GenerationProgress("generating", 4)
    progress.add(3)
    progress.close()
    shown = stream.getvalue()
    assert "generating:" in shown and "/4" in shown
    assert shown.endswith("\r") and "\n" not in shown


@pytest.mark.parametrize("stream", [_Terminal, io.StringIO])
def test_other_ranks_show_nothing(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, clock = stream(), _Clock()
    monkeypatch.setattr(sys, "stderr", here)
    progress = GenerationProgress("generating", 4, shown=False, clock=clock)
    clock.now += 10 * LINE_S
    progress.add(4)
    progress.close()
    assert here.getvalue() == ""


def test_a_terminal_without_a_width_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pseudo-terminal as docker and kubectl open one: 0 columns."""
    master, slave = pty.openpty()
    clock = _Clock()
    with open(slave, "w", closefd=False) as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        progress = GenerationProgress("generating", 4, clock=clock)
        clock.now += LINE_S
        progress.add(3)
        progress.close()
    shown = os.read(master, 4096).decode()
    os.close(slave)
    os.close(master)
    assert shown.endswith(f"generating 3/4, {LINE_S:.0f} s\r\n")
