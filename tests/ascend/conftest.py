"""Tests of the NPU path on the emulator; they run in an environment of their own (``run.sh``)."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

EMULATED = "MINDSPEED_RL_ASCEND_EMULATOR" in os.environ
COUNTS_VARIABLE = "MINDSPEED_RL_ASCEND_COUNTS"
_FOLDER = pytest.StashKey[Path]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the emulator's environment every test here is skipped, with what to do."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.ascend_emul)
        if not EMULATED:
            item.add_marker(
                pytest.mark.skip(reason="no emulated CANN in this process: run tests/ascend/run.sh")
            )


@pytest.fixture(scope="session", autouse=True)
def operator_counts(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[None]:
    """Every process of the session leaves its counts in one folder; the summary prints them."""
    folder = tmp_path_factory.mktemp("counts")
    pytestconfig.stash[_FOLDER] = folder
    os.environ[COUNTS_VARIABLE] = str(folder)
    yield
    if EMULATED:
        from ascend.emulator.device import emulate

        emulate().write_counts()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """What the emulator ran."""
    folder = config.stash.get(_FOLDER, None)
    files = list(folder.glob("*.json")) if folder else []
    if not files:
        return
    total: Counter[str] = Counter()
    for file in files:
        total.update(json.loads(file.read_text()))
    terminalreporter.section("operators that the emulator ran on npu tensors")
    for namespace in sorted({name.partition("::")[0] for name in total}):
        own = Counter({n: c for n, c in total.items() if n.startswith(namespace + "::")})
        listed = ", ".join(f"{n.partition('::')[2]} {c}" for n, c in own.most_common(12))
        terminalreporter.line(
            f"{namespace}: {len(own)} operators, {own.total()} calls in {len(files)} processes; "
            f"most called: {listed}"
        )
