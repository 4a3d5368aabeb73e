"""Each benchmark of tools/bench runs on a tiny case and tells ours, the baseline and the floor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.architecture import ROOT
from support.spawn import end_ranks
from support.warm_ranks import SERVER

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def result_of(script: str, *flags: str, folder: Path) -> dict[str, Any]:
    """The last line of a benchmark, which runs in forks that have imported the libraries."""
    own = folder / "bench"
    own.mkdir()
    path = str(ROOT / "tools" / "bench" / script)
    command = {"script": path, "flags": flags, "cwd": str(folder)}
    (own / "command.json").write_text(json.dumps(command))
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)]),
        "RANK": "0",
    }
    bench = SERVER.start(own, variables, "support.forked_bench")
    end_ranks(script, own, [bench], timeout_s=500.0)
    return _result((own / "rank0.log").read_text())


def _result(told: str) -> dict[str, Any]:
    (line,) = [line for line in told.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def test_any_user_can_start_one_from_any_folder(tmp_path: Path) -> None:
    """As a new process, whose ranks are new processes."""
    flags = ("--workers", "2", "--megabytes", "1", "--repeats", "1")
    command = [sys.executable, str(ROOT / "tools" / "bench" / "dispatch.py"), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("RESULT ")
    (size,) = _result(done.stdout)["sizes"]
    assert set(size["seconds"]) == {"ours", "controller", "floor"}
    assert all(taken > 0 for taken in size["seconds"].values())
    assert 0.9 * 2**20 < size["bytes"] <= 2**20


def test_reshard(tmp_path: Path) -> None:
    """Bits are compared in the run; ours receives the floor, whole tensors several times that."""
    (case,) = result_of("reshard.py", "--cases", "tiny", "--repeats", "1", folder=tmp_path)["cases"]
    direct, gather = (case["ways"][way] for way in ("direct", "gather"))
    assert direct["busiest_bytes"] == case["floor_bytes"] > 0
    assert 2 * case["floor_bytes"] < gather["busiest_bytes"] < case["weights_bytes"]
    assert direct["median_s"] > 0 and gather["median_s"] > 0


def test_deltas(tmp_path: Path) -> None:
    """Bits are compared in the run; few words change at a small rate, nearly all at a large one."""
    flags = ("--hidden-size", "128", "--num-layers", "1", "--vocabulary", "500", "--steps", "1")
    found = result_of("deltas.py", *flags, "--learning-rates", "1e-6", "1", folder=tmp_path)[
        "rates"
    ]
    few, many = found["1e-06"], found["1"]
    assert few["words"] == many["words"] > 10**5 and few["changed"] < 0.1 * few["words"]
    assert 0 < few["coded_bytes"] < 0.1 * few["words"] and few["entropy_bytes"] > 0
    assert many["changed"] > 0.7 * many["words"], "all but rows of tokens that were not drawn"
    assert many["coded_bytes"] <= 1.01 * 2 * many["words"]
    assert few["encode_s"] > 0 and few["decode_s"] > 0


def test_tail_run(tmp_path: Path) -> None:
    """The simulation of the run as drawn takes the steps that its engines took."""
    flags = ("--dataset", "8", "--prompts", "4", "--group", "2", "--slots", "8",
             "--warm-steps", "2", "--ways")  # fmt: skip
    found = result_of("tail_run.py", *flags, "as drawn", "ordered", folder=tmp_path)["slots"]["8"]
    drawn, ordered = found["as drawn"], found["ordered"]
    assert drawn["simulated"] == drawn["as drawn"]
    assert drawn["run"] == pytest.approx(drawn["simulated"])
    assert ordered["run"] == pytest.approx(ordered["simulated"])
    for row in (drawn, ordered):
        assert row["run"]["steps"] > 1 and 0 < row["run"]["idle"] < 1


def test_head(tmp_path: Path) -> None:
    found = result_of(
        "head.py", "--tokens", "20", "--vocabulary", "500", "--hidden", "16",
        "--logprob-chunk-tokens", "7", "--repeats", "1", folder=tmp_path,
    )  # fmt: skip
    assert found["tile_bytes"] == 7 * 500 * 4
    for precision in ("float32", "bfloat16"):
        assert found[precision]["head"] > 0 < found[precision]["products"]


def test_switch(tmp_path: Path) -> None:
    found = result_of(
        "switch.py", "--num-layers", "1", "--hidden-size", "128", "--cycles", "1",
        "--warm-cycles", "1", "--kv-cache-gb", "0.05", folder=tmp_path,
    )  # fmt: skip
    shared = {"offload parameters", "onload optimizer", "total"}
    assert shared <= set(found["ours_s"]) and shared <= set(found["sequential_s"])
    assert found["floor_s"] > 0 and found["bytes"]["copied"] > found["bytes"]["engine_weights"] > 0


def test_checkpoints(tmp_path: Path) -> None:
    """Bytes are compared in the run; a save takes no more than predicted, but for what malloc kept.

    Memory that an earlier part of the process freed may serve a save again, so the growth of the
    resident size has a floor of nothing only.
    """
    flags = ("--num-layers", "1", "--hidden-size", "768", "--repeats", "1")
    found = result_of("checkpoints.py", *flags, folder=tmp_path)
    num_parameters = 4 * 768**2 + 3 * 768 * 2112  # of the layer
    stored, memory = found["bytes"], found["memory"]
    assert stored > 14 * num_parameters / 2 and 0 < found["exposed_s"] < found["at_once_s"]
    assert {"plan", "check", "write", "copy", "step meanwhile"} <= set(found["seconds"])
    assert memory["predicted_background"] == pytest.approx(stored, rel=0.05)
    for kind in ("at_once", "background"):
        assert 0 < memory[kind] < 1.2 * stored
        assert memory[kind] < memory[f"predicted_{kind}"] + 0.2 * stored


def test_engine_steps(tmp_path: Path) -> None:
    flags = ("--sequences", "8", "--tokens", "32", "--rounds", "1", "--kv-cache-mb", "64")
    found = result_of("engine_steps.py", *flags, folder=tmp_path)
    for way in ("ours", "baseline"):
        assert found[way]["longest_ms"] >= found[way]["host_ms"] > 0 < found[way]["kernels_ms"]


def test_drafts(tmp_path: Path) -> None:
    """The true continuation takes few steps, whatever the model."""
    flags = ("--prompts", "2", "--group", "2", "--tokens", "48", "--kv-cache-mb", "64")
    for *epochs, again in result_of("drafts.py", *flags, folder=tmp_path)["steps"].values():
        assert again < 0.5 and len(epochs) == 3 and all(0 < steps <= 1 for steps in epochs)


def test_drafted_conversations(tmp_path: Path) -> None:
    """They are those without drafts, and the true continuation takes few steps."""
    flags = ("--prompts", "2", "--group", "2", "--tokens", "48", "--kv-cache-mb", "64",
             "--train-steps", "5")  # fmt: skip
    found = result_of("drafted_conversations.py", *flags, folder=tmp_path)
    *epochs, again = [row["steps_per_token"] for row in found["steps"]]
    assert found["equal"] and again < 0.5 and all(0.5 < steps <= 1 for steps in epochs)
    assert all(row["steps_per_token"] == 1 for row in found["none"])


def test_shared_evaluation(tmp_path: Path) -> None:
    """Tokens are those of an evaluation by itself, in fewer steps, but not fewer than rollouts."""
    flags = ("--sequences", "6", "--prompts", "3", "--capacity", "16", "--tokens", "24",
             "--rounds", "1", "--kv-cache-mb", "64")  # fmt: skip
    found = result_of("shared_evaluation.py", *flags, folder=tmp_path)
    steps = found["steps"]
    assert found["equal"] and steps["floor"] <= steps["together"] < steps["apart"]
    assert min(found["ms"].values()) > 0


def test_prompts(tmp_path: Path) -> None:
    """All ways find the same prompts, and nothing is left behind."""
    flags = ("--rows", "300", "--tokens", "2000", "--folder", str(tmp_path))
    ways = result_of("prompts.py", *flags, folder=tmp_path)["ways"]
    assert set(ways) == {"first", "ours", "plain"}
    assert len({way["fingerprint"] for way in ways.values()}) == 1
    assert all(way["seconds"] > 0 and way["step"]["resident"] > 0 for way in ways.values())
    assert [path.name for path in tmp_path.iterdir()] == ["bench"]


def test_e2e(tmp_path: Path) -> None:
    found = result_of(
        "e2e.py", "--size", "tiny", "--ranks", "2", "--prompts", "2", "--group-size", "2",
        "--response-length", "8", "--steps", "3", "--rounds", "1", "--warm-steps", "0",
        folder=tmp_path,
    )  # fmt: skip
    ((ours,), (plain,)) = found["rounds"]["ours"], found["rounds"]["plain"]
    assert found["ratio"] == ours["tokens_per_s"] / plain["tokens_per_s"]
    assert 0 < ours["tokens_per_step"] <= 32 and 0 < plain["tokens_per_step"] <= 32
    assert found["floor_s"] > 0 and ours["sync_bytes"] >= 0
