"""torch_npu's own profiler records a window of steps of a trainer on an emulated NPU.

Real: its Python and C++, the framework's events, their analysis. Not here: what CANN records of a
device, and msprof, which reads it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ascend.npu_ranks import WITH_AND_WITHOUT, run_npu_ranks

pytestmark = [pytest.mark.ascend_emul, pytest.mark.slow]

FLAGS = (
    *("--profile", "--profile-step-start", "2", "--profile-step-end", "3"),
    *("--profile-level", "level1", "--profile-with-memory", "--profile-record-shapes"),
)  # stacks, of the emulator's own Python as well, would make 90 MB of a step


@pytest.mark.parametrize("features", WITH_AND_WITHOUT)
def test_a_window_of_steps_is_recorded_and_analysed(
    features: Any, tiny_model: Path, tmp_path: Path
) -> None:
    from ascend.worlds import profile_world

    folder = tmp_path / "traces"
    args = (str(tiny_model), [*FLAGS, "--profile-save-path", str(folder)], 3)
    (method,) = run_npu_ranks(
        profile_world, 1, work_dir=tmp_path / "ranks", args=args, features=features
    )
    assert method == "spawn", "torch_npu's choice of fork is its own"
    (trace,) = folder.iterdir()
    assert re.fullmatch(r"rank0_\d+_\d+_ascend_pt", trace.name)
    told = json.loads((trace / "profiler_info_0.json").read_text())["config"]
    common = told["common_config"]
    assert common["record_shapes"] and common["profile_memory"] and not common["with_stack"]
    assert sorted(common["activities"]) == ["ProfilerActivity.CPU", "ProfilerActivity.NPU"]
    assert told["experimental_config"]["_profiler_level"] == "Level1"
    output = trace / "ASCEND_PROFILER_OUTPUT"
    events = json.loads((output / "trace_view.json").read_text())
    names = {str(event.get("name")) for event in events}
    assert {n for n in names if n.startswith("phase ")} == {"phase step 2"}
    assert {"aten::matmul", "npu::npu_fusion_attention"} <= names
    for table in ("operator_details.csv", "operator_memory.csv"):
        assert len((output / table).read_text().splitlines()) > 20, table
