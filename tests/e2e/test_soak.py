"""The soak of some minutes: what attacks a run changes none of its bits."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from soak import (
    FULL_S,
    NOTICES,
    SAVE_INTERVAL,
    Attack,
    Usage,
    Watch,
    deaths_within,
    growth,
    planned,
)
from support.jobs import ROOT, run_to_end

pytestmark = pytest.mark.e2e


def test_growth_is_told_and_noise_is_not() -> None:
    flat = [100.0, 104.0, 99.0, 101.0] * 5
    assert growth(flat, 0.05, 1.0) == ""
    assert growth([*flat[:10], *(100.0 + 3 * n for n in range(10))], 0.05, 1.0)
    assert growth([1.0, 50.0, 90.0], 0.05, 1.0) == "", "too few to say"
    watch = Watch({7: Usage("rank 0 (pid 7)")}, [0.0] * 20)
    watch.processes[7].values["descriptors"] = [20.0 + n for n in range(15)]
    watch.processes[7].values["threads"] = [9.0] * 15
    assert [line.split(" grew")[0] for line in watch.findings()] == ["rank 0 (pid 7): descriptors"]


@pytest.mark.parametrize("num_steps", [4, 14, 300])
def test_every_kind_of_attack_is_planned_within_the_run(num_steps: int) -> None:
    for seed in range(20):
        plan = planned(num_steps, random.Random(seed))
        assert {kind for _, kind in plan} == {"worker", "disk", "log", "rank"}
        assert all(1 <= step < num_steps for step, _ in plan) and plan == sorted(plan)
        deaths = [step for step, kind in plan if kind == "rank"]
        assert min(deaths) > SAVE_INTERVAL or num_steps <= SAVE_INTERVAL + 1
        few = planned(num_steps, random.Random(seed), 2)
        assert 1 <= [kind for _, kind in few].count("rank") <= 2 and len(few) == len(plan)


class _Disk:
    is_full = False

    def fill(self, _: object) -> None:
        self.is_full = True

    def empty(self, _: object) -> None:
        self.is_full = False


@pytest.mark.parametrize("notice", NOTICES)
def test_a_full_disk_is_done_when_the_run_has_noticed_it(
    monkeypatch: pytest.MonkeyPatch, notice: str
) -> None:
    """Not by an earlier notice, and not by time; it is then filled again after another step."""
    said = [notice]
    run = SimpleNamespace(ranks=lambda: [7], told=lambda: " ".join(said))
    now = [0.0]
    monkeypatch.setattr("soak.time.monotonic", lambda: now[0])
    disk: Any = _Disk()
    attack = Attack(cast(Any, run), disk, random.Random(0), [(3, "disk"), (4, "log")])
    attack.advance(3)
    attack.advance(3)
    assert disk.is_full and not attack.done["disk"]
    now[0] = FULL_S + 1
    attack.advance(3)
    assert not disk.is_full and not attack.done["disk"] and (4, "disk") in attack.plan
    attack.advance(3)
    assert not disk.is_full, "not before another step"
    attack.advance(4)
    assert disk.is_full
    said.append(notice)
    attack.advance(4)
    assert not disk.is_full and attack.done["disk"] == 1 and attack.plan == [(4, "log")]


def test_a_run_says_of_a_full_disk_what_the_soak_waits_for() -> None:
    sources = [
        ROOT / "mindspeed_rl" / name for name in ("metrics/jsonl.py", "checkpoint/resume.py")
    ]
    for notice, source in zip(NOTICES, sources, strict=True):
        assert notice in source.read_text()


def test_ranks_die_as_often_as_the_time_holds() -> None:
    assert deaths_within(386.0, 214.0, 25.0) == 6
    assert deaths_within(10.0, 214.0, 25.0) == 1


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_a_run_under_attack_ends_with_the_same_bits(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "soak.py"), "--steps", "60", "--ranks", "1"]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT}/tools", "TMPDIR": str(tmp_path)}
    ended = run_to_end(command, 1200.0, path, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert "the same bits, nothing grew" in ended.stdout
    # The next start of a job removes the folders of launchers that are gone.
    # torchinductor_USER is PyTorch's cache of compiled code, made where a library imports inductor.
    known = ("torchelastic_", "torchinductor_")
    left = [path for path in tmp_path.iterdir() if not path.name.startswith(known)]
    assert not left
