"""The dispatch benchmark: its plane, its intervals, what it prints."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from bench.dispatch import CONTROLLER, Measured, faster, measured_in
from bench.dispatch_fit import Estimate, Plane, Point, fit, student_t
from bench.dispatch_report import PREDICTED, Practice, fits, growth, predictions, table
from bench.dispatch_ways import NUM_SAMPLES, TOKEN_BYTES, Batch, cut, joined

GRID = [(w, b) for w in (2, 4, 8, 16) for b in (16, 64, 256)]


def points(base: float, per_mb: float, per_worker: float, noise: float = 0.0) -> list[Point]:
    random = np.random.default_rng(0)
    return [
        Point(w, b, base + per_mb * b + per_worker * w + noise * random.standard_normal())
        for w, b in GRID
    ]


def test_a_plane_is_found() -> None:
    plane = fit(points(0.5, 0.002, 0.01))
    found = (plane.base_s.value, plane.per_megabyte_s.value, plane.per_worker_s.value)
    assert found == pytest.approx((0.5, 0.002, 0.01), rel=1e-9)
    assert plane.at(256, 1000) == pytest.approx(0.5 + 2.0 + 2.56)
    assert not plane.per_megabyte_s.is_zero


def test_a_slope_in_the_noise_is_told_from_one_that_is_there() -> None:
    flat, steep = fit(points(0.1, 0.0, 0.01, 0.01)), fit(points(0.1, 0.001, 0.01, 0.01))
    assert flat.per_megabyte_s.is_zero and not steep.per_megabyte_s.is_zero
    assert abs(steep.per_megabyte_s.value - 0.001) < 3 * steep.per_megabyte_s.half


def test_intervals_are_students() -> None:
    for freedom, quantile in ((1, 12.7062), (2, 4.30265), (9, 2.26216), (17, 2.10982)):
        assert student_t(freedom) == pytest.approx(quantile, rel=1e-5)


def test_points_on_a_line_determine_no_plane() -> None:
    with pytest.raises(ValueError, match="several values of --workers"):
        fit([Point(2, b, 1.0) for b in (16, 64, 128, 256)])


def test_what_goes_through_the_controller_is_the_batch() -> None:
    batch = Batch(workers=3, megabytes=2)
    sizes = [sum(batch.lengths[i] for i in batch.of_worker(w)) for w in range(3)]
    assert sum(sizes) * TOKEN_BYTES == pytest.approx(2 << 20, rel=1e-2)
    assert sorted(i for w in range(3) for i in batch.of_worker(w)) == list(range(NUM_SAMPLES))
    whole = joined([batch.tensors(w) for w in range(3)])
    for worker in range(3):
        part, made = cut(whole, sizes, worker), batch.tensors(worker)
        assert all(np.array_equal(part[name], made[name]) for name in made)


def test_of_the_controllers_ways_the_faster_counts_at_each_point() -> None:
    """With the start skew of that way, not the smaller one."""
    seconds = {
        CONTROLLER[0]: [Point(2, 16, 1.0), Point(2, 64, 5.0), Point(4, 16, 2.0)],
        CONTROLLER[1]: [Point(2, 16, 3.0), Point(2, 64, 4.0), Point(4, 16, 2.5)],
        "bare": [Point(2, 16, 0.1), Point(2, 64, 0.1), Point(4, 16, 0.1)],
    }
    skews = {
        CONTROLLER[0]: [Point(2, 16, 0.9), Point(2, 64, 0.1), Point(4, 16, 0.8)],
        CONTROLLER[1]: [Point(2, 16, 0.2), Point(2, 64, 0.7), Point(4, 16, 0.3)],
    }
    fast, skew = faster(seconds, skews)
    assert fast == [Point(2, 16, 1.0), Point(2, 64, 4.0), Point(4, 16, 2.0)]
    assert skew == [Point(2, 16, 0.9), Point(2, 64, 0.7), Point(4, 16, 0.8)]


def test_an_earlier_run_is_added_from_its_last_result(tmp_path: Path) -> None:
    found = [
        Measured("bare", 2, 16, [0.25, 0.5], [0.0, 0.125]),
        Measured("spmd, move", 2, 64, [1.5], [0.5]),
    ]
    old, new = ({"measured": [asdict(m) for m in of]} for of in (found[:1], found))
    file = tmp_path / "run.log"
    lines = ["W 2 measured", f"RESULT {json.dumps(old)}", f"RESULT {json.dumps(new)}", "0.10 load"]
    file.write_text("\n".join(lines))
    assert measured_in(file) == found


def test_a_run_that_has_not_ended_is_not_added(tmp_path: Path) -> None:
    file = tmp_path / "run.log"
    file.write_text("memcpy: 5.00 GB/s\nno RESULT {}\n")
    with pytest.raises(SystemExit, match=r"run\.log: no line begins"):
        measured_in(file)


def test_growth_is_over_equal_shares() -> None:
    same = {
        way: [Point(2, 16, 1.0), Point(2, 32, 1.5), Point(4, 32, 2.5), Point(4, 64, 9.0)]
        for way in ("controller", "ray with cache, move", "spmd, move", "bare")
    }
    lines = growth(same)[1:]
    assert lines[0].endswith("W 2: 1.00, W 4: 2.50") and lines[0].startswith("  8 MB each")
    assert lines[-1].startswith("  16 MB each") and lines[-1].endswith("W 2: 1.00, W 4: 6.00")


def test_predictions_are_named_so_and_stand_beside_what_was_published() -> None:
    plane = Plane(Estimate(0.1, 0.0), Estimate(0.002, 0.0), Estimate(0.01, 0.0))
    planes = dict.fromkeys(PREDICTED, plane)
    practice = Practice()
    text = predictions(planes, planes, practice)
    assert text[0].startswith("PREDICTED for 256 workers, 8192 samples of at most 3072 tokens")
    assert all(published in text[0] for published in ("57 s", "73 s", "< 1 s", "~5 s"))
    seconds = 0.1 + 0.002 * practice.dispatched_mb + 2.56
    assert f"controller: start skew {seconds:.1f} s, hand-over {seconds:.1f} s" in text[1]
    assert "agree: start skew 2.7 s" in text[2], "nothing moves: bytes do not matter"
    assert practice.dispatched_mb == pytest.approx(8192 * 3072 * 36 * 32 / 2**20)


def test_the_table_has_every_point() -> None:
    found = {"controller": points(0.1, 0.01, 0.0), "spmd, move": points(0.1, 0.001, 0.0)}
    lines = table(found, dict.fromkeys(found, points(0.001, 0.0, 0.0)), 5e9)
    assert len(lines) == 2 + 2 * len(GRID) and lines[0] == "memcpy: 5.00 GB/s"
    assert lines[2].endswith("%") and "1.0" in lines[-1]
    assert len(fits("seconds", {way: fit(p) for way, p in found.items()})) == 3
