"""What a real run reaches on objects of the CPU's vLLM, the vLLM of NPUs has as well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.ascend_api import snapshot
from support.attribute_trace import collected
from support.jobs import ROOT, TorchrunJob
from support.whole_runs import COMMON, rows_of, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENTRY = str(ROOT / "tests" / "support" / "attribute_trace.py")
LIMIT_S = 300.0
FLAGS = [
    *COMMON, "--train-iters", "2", "--use-distributed-optimizer",
    "--grpo-prompts-per-step", "2", "--grpo-group-size", "4", "--micro-batch-size", "4",
    "--max-prompt-length", "24", "--rollout-max-response-length", "6",
    "--vllm-max-num-seqs", "16", "--output-dir", "out", "--save", "out/save",
    "--expert-model-parallel-size", "2", "--rollout-dp", "2", "--rollout-ep", "2",
    "--rollout-graph-sizes", "auto", "--rl-offload", "optimizer", "--rollout-sleep", "all",
]  # fmt: skip


def test_attributes_of_objects_are_in_the_snapshot(tmp_path: Path) -> None:
    """Experts, data-parallel ranks, offload and a save; also what the engine measured."""
    write_inputs(tmp_path, 8, family="qwen3_moe")
    target = [ENTRY, str(tmp_path / "trace"), "mindspeed_rl.train_rl"]
    with TorchrunJob(tmp_path, target, FLAGS, fresh=True) as job:
        ended = job.end(LIMIT_S)
    assert ended.returncodes == (0,), ended.output
    traced = collected(tmp_path / "trace")
    known = snapshot()["packages"]["vllm 0.23.0"]
    lost = [f"{o}.{n}" for o, names in traced.items() for n in names if f"{o}.{n}" not in known]
    assert lost == [], f"run tests/support/ascend_api/update.py --trace {tmp_path / 'trace'}"
    assert "vllm.v1.engine.llm_engine:LLMEngine" in traced and len(traced) > 10
    for step in rows_of(tmp_path / "out"):
        assert step["rollout/dp_reductions_per_step"] == 1.0
        assert step["throughput/engine_ms_per_step"] > step["throughput/dp_sync_ms_per_step"] > 0
    history = json.loads((tmp_path / "out/decode_batches.json").read_text())["steps"]
    assert history and all(1 <= int(running) <= 8 for running in history)
    assert "graph sizes 1 2 3" in ended.output
    assert "16: no earlier decode steps in out" in ended.output
