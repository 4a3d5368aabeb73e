"""tools/bench/operators.py: own time of operators in a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench.operators import OUTSIDE, Range, kind_of, own_times, seconds_by_kind

MAIN, BACKWARD = (1, 1), (1, 2)


def test_an_operator_owns_what_its_callees_leave() -> None:
    ranges = [
        Range("aten::linear", MAIN, 0, 100),
        Range("aten::addmm", MAIN, 10, 90),
        Range("aten::copy_", MAIN, 20, 30),
        Range("aten::add", MAIN, 100, 105),  # begins where linear ends
        Range("aten::mm", BACKWARD, 50, 60),  # another thread is nobody's callee
    ]
    own = {r.name: seconds for r, seconds in own_times(ranges)}
    assert own == {
        "aten::linear": 20, "aten::addmm": 70, "aten::copy_": 10, "aten::add": 5, "aten::mm": 10,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matrix products"),
        ("aten::mul", "elementwise"),
        ("aten::_log_softmax_backward_data", "exponentials"),
        ("aten::log", "exponentials"),
        ("aten::expand", "other operators"),
        ("aten::index_select", "copies"),
        ("aten::_index_put_impl_", "copies"),
        ("aten::zero_", "copies"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("gloo:all_reduce", "collectives"),
        ("MulBackward0", "other operators"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_real_trace_sums_to_its_stretches(tmp_path: Path) -> None:
    """Forward and backward passes inside the stretch count, those outside do not."""
    trace = tmp_path / "trace.json"
    weight = torch.randn(256, 256, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.randn(64, 64).exp()
        for _ in range(2):
            with torch.profiler.record_function("train"):
                (weight @ weight).sum().backward()
    profiler.export_chrome_trace(str(trace))
    found = seconds_by_kind(trace, "train")
    assert found["matrix products"] > 0
    assert "exponentials" not in found
    stretches = [e for e in json.loads(trace.read_text())["traceEvents"]
                 if e.get("name") == "train" and e.get("cat") == "user_annotation"]  # fmt: skip
    assert len(stretches) == 2
    assert sum(found.values()) == pytest.approx(sum(e["dur"] for e in stretches) / 1e6)
    assert OUTSIDE in found
    with pytest.raises(ValueError, match=r"trace\.json: no range 'sleep'"):
        seconds_by_kind(trace, "sleep")
