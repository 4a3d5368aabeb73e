"""tools/inspect_plan.py: figures that can be checked, and errors that say what to change."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import inspect_plan
import pytest
from reshard_figures import RoundTraffic, critical_bytes, round_traffic
from support.published import PUBLISHED, Reshard
from support.tiers import slow_but

from mindspeed_rl.weight_layouts.base import pieces_of
from mindspeed_rl.weights.planner import plan_reshard
from mindspeed_rl.weights.schedule import plan_schedule
from mindspeed_rl.weights.traffic import element_bytes_of, rank_traffic

ROOT = Path(__file__).resolve().parents[3]

QWEN_7B = Reshard("qwen2.5-7b", 16, "tp=4,pp=2", "tp=2", 8)
QWEN_30B = Reshard(
    "qwen3-30b-a3b", 16, "tp=4,pp=2,ep=8,etp=1,num_layer_list=1-1", "tp=2,dp=8,ep=16", 4
)


def flags_of(case: Reshard) -> list[str]:
    """The command line of a case, without the model."""
    return [
        *("--train", case.train, "--rollout", case.rollout),
        *("--world", str(case.world), "--ranks-per-node", str(case.ranks_per_node)),
    ]


def run_tool(*flags: str) -> str:
    command = [sys.executable, "tools/inspect_plan.py", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- figures -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """The table and the JSON of Qwen2.5-7B, given as a checkpoint folder."""
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(PUBLISHED["qwen2.5-7b"].read_text())
    out = folder / "out.json"
    speeds = ["--intra-node-gbs", "150", "--inter-node-gbs", "25"]
    text = run_tool("--hf-config", str(folder), *flags_of(QWEN_7B), *speeds, "--json", str(out))
    return text, json.loads(out.read_text())


def test_json_holds_every_key(report: tuple[str, list[dict[str, Any]]]) -> None:
    _, entries = report
    assert [e["strategy"] for e in entries] == ["direct"]
    for entry in entries:
        keys = ("recv_bytes", "recv_inter_node_bytes", "recv_intra_node_bytes", "send_bytes")
        for key in (*keys, "floor_bytes", "node_floor_bytes", "whole_tensor_bytes"):
            assert set(entry[key]) == {"min", "mean", "max"}
            assert entry[key]["min"] <= entry[key]["mean"] <= entry[key]["max"]
        of_nodes = entry["recv_inter_node_bytes"]["mean"] + entry["recv_intra_node_bytes"]["mean"]
        assert of_nodes == pytest.approx(entry["recv_bytes"]["mean"])
        parts = entry["critical_within_nodes_bytes"] + entry["critical_between_nodes_bytes"]
        assert parts == entry["critical_bytes"] > 0
        assert entry["peak_staging_bytes"] > 0 and entry["messages_per_rank"] > 0
        assert entry["rounds"] > 0 and entry["plan_s"] >= 0
        wire_s = entry["critical_within_nodes_bytes"] / 150e9
        wire_s += entry["critical_between_nodes_bytes"] / 25e9
        assert entry["estimated_s"] == pytest.approx(wire_s)


def test_direct_is_at_the_floor(report: tuple[str, list[dict[str, Any]]]) -> None:
    text, (direct,) = report
    assert direct["recv_bytes"] == direct["floor_bytes"]
    assert direct["send_bytes"]["mean"] == direct["recv_bytes"]["mean"]
    # 7.6 GB of weights without what a rank of TP4 PP2 holds
    weights = sum(2 * prod(shape) for shape in QWEN_7B.layouts()[0].hf_shapes.values())
    assert 0.85 * weights < direct["whole_tensor_bytes"]["min"] < weights
    assert re.search(r"^in / floor +1\.00$", text, re.MULTILINE)


@pytest.mark.slow
def test_some_ranks_of_the_deepseek_case(tmp_path: Path) -> None:
    """The example of ``--help``, with the config of the test data."""
    words = shlex.split(inspect_plan.EXAMPLE.split("\n", 1)[1].replace("\\\n", " "))
    assert words[:2] == ["python", "tools/inspect_plan.py"]
    flags = words[2:]
    flags[flags.index("--hf-config") + 1] = str(PUBLISHED["deepseek-v3"])
    flags[flags.index("--json") + 1] = str(tmp_path / "plan.json")
    flags[flags.index("--ranks") + 1] = "17"
    run_tool(*flags)
    (direct,) = json.loads((tmp_path / "plan.json").read_text())
    floor = direct["floor_bytes"]["max"]
    assert direct["recv_bytes"] == {"min": floor, "mean": floor, "max": floor}
    assert direct["whole_tensor_bytes"]["min"] > 50 * floor


def test_reference_cases_are_those_of_the_docs() -> None:
    text = run_tool("--case", "B", "--ranks", "0")
    assert "1 of 16 ranks, 16 per node" in text
    page = (ROOT / "docs" / "resharding.md").read_text()
    for _, train, rollout, world in inspect_plan.CASES.values():
        assert f"`--train {train} --rollout {rollout}`" in page and f" on {world} ranks" in page


def rows_of(figures: dict[str, Any]) -> tuple[str, str]:
    """The cells of a case in the tables of docs/resharding.md, but for its name: plan, handover."""

    def gb(size: float, digits: int = 2) -> str:
        return f"{size / 1e9:.{digits}f}"

    recv, floor, need, inter = (
        figures[key]["mean"]
        for key in ("recv_bytes", "floor_bytes", "need_bytes", "recv_inter_node_bytes")
    )
    plan = [
        *(f"{gb(recv)} ({gb(floor)}) GB", f"{gb(need)} GB", f"{gb(inter)} GB" if inter else "0"),
        *(f"{gb(figures['critical_bytes'])} GB", str(figures["rounds"])),
        f"{figures['messages_per_rank']:.0f} / {figures['most_messages']}",
    ]
    joint = figures["handover"]
    gather, sync, both, least = (joint[key] for key in ("gather", "sync", "both", "floor"))
    saved = 1 - least["of_all_ranks"] / both["of_all_ranks"]
    waiting = joint["waiting_bytes"] / (both["most_of_a_rank"] + joint["waiting_bytes"])
    handover = [
        *(f"{gb(of['of_all_ranks'], 3)} ({gb(of['most_of_a_rank'], 3)})" for of in (gather, sync)),
        *(gb(of["of_all_ranks"], 3) for of in (both, least)),
        *(f"{100 * share:.2f} %" for share in (saved, waiting)),
    ]
    return " | ".join(plan), " | ".join(handover)


@pytest.mark.parametrize("name", slow_but(tuple(inspect_plan.CASES), ("A", "E")))
def test_the_docs_have_the_figures_of_the_cases(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both tables; small cases are of all ranks, the others of every eleventh, as the page says."""
    world = inspect_plan.CASES[name][-1]
    ranks = "all" if world <= 16 else ",".join(map(str, range(0, world, 11)))
    out = tmp_path / "plan.json"
    flags = ["--case", name, "--ranks", ranks, "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["inspect_plan.py", *flags])
    inspect_plan.main()
    (figures,) = json.loads(out.read_text())
    page = (ROOT / "docs" / "resharding.md").read_text()
    plan, handover = rows_of(figures)
    assert re.search(rf"^\| {name}: [^|]*\| {re.escape(plan)} \|$", page, re.MULTILINE), plan
    assert f"\n| {name} | {handover} |\n" in page, handover


# --- counting ----------------------------------------------------------------------------------


def test_critical_bytes_by_hand() -> None:
    """Exchange 0: 7 (sent by the second rank); exchange 1: 5 (received by the first)."""
    first = RoundTraffic(receive_bytes=(3, 5), send_bytes=(1, 0), num_messages=2)
    second = RoundTraffic(receive_bytes=(0, 2), send_bytes=(7, 4), num_messages=1)
    assert critical_bytes([first, second]) == 7 + 5


@pytest.mark.parametrize("relay", [False, True])
def test_traffic_of_all_ranks_is_consistent(relay: bool) -> None:
    """Sends equal receives, in all and between nodes; rounds add up to the whole."""
    source, target = QWEN_30B.layouts()
    bytes_of = element_bytes_of(source, 2)
    plans = [plan_reshard(source, target, rank, 4, relay=relay) for rank in range(QWEN_30B.world)]
    traffic = [rank_traffic(plan, bytes_of, 4) for plan in plans]
    assert sum(t.send_bytes for t in traffic) == sum(t.receive_bytes for t in traffic)
    inter = sum(t.inter_node_receive_bytes for t in traffic)
    assert 0 < inter == sum(t.inter_node_send_bytes for t in traffic)
    assert inter < sum(t.receive_bytes for t in traffic)
    schedule = plan_schedule(
        source, target, bucket_bytes=2**28, item_bytes=2, ranks_per_node=4, relay=relay
    )
    assert schedule.num_rounds > 2
    parts = [round_traffic(plan, schedule, source, bytes_of) for plan in plans]
    for plan, whole, rounds in zip(plans, traffic, parts, strict=True):
        assert sum(rounds.receive_bytes) == whole.receive_bytes
        assert sum(rounds.send_bytes) == whole.send_bytes
        assert rounds.peak_bytes <= 2**28
        assert whole.num_senders <= rounds.num_messages
        needed = (s.piece.hf_box.num_elements for s in pieces_of(target, plan.rank))
        assert whole.receive_bytes + whole.copy_bytes == 2 * sum(needed)
    received, sent = (r.receive_bytes for r in parts), (r.send_bytes for r in parts)
    assert list(map(sum, zip(*received, strict=True))) == list(map(sum, zip(*sent, strict=True)))


# --- errors ------------------------------------------------------------------------------------

MOE = ("--hf-config", str(PUBLISHED["qwen3-30b-a3b"]), "--world", "16")
DENSE = ("--hf-config", str(PUBLISHED["qwen2.5-7b"]), "--world", "16")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((*DENSE, "--train", "tq=2"), "--train tq=2: .* allowed keys: tp, pp, vpp"),
        ((*DENSE, "--rollout", "tp"), "--rollout tp: give KEY=VALUE .*tp, dp, ep"),
        ((*DENSE, "--train", "tp=2,tp=4"), "--train tp=4: .* each key once"),
        # the run's own checks of layouts: one of each side
        ((*DENSE, "--train", "tp=8"), "--tensor-model-parallel-size .*8 .* the divisors of 28"),
        ((*MOE, "--train", "moe_tp_extend_ep=yes"), "moe_tp_extend_ep=yes: allowed are 0 and 1"),
        ((*MOE, "--rollout", "tp=2,dp=4,ep=4"), "--rollout-ep 4: .*allowed: 1 or .* = 8"),
        ((*DENSE, "--ranks", "0,16"), "--ranks 0,16: allowed are all, or .* 0 to 15"),
        ((*DENSE, "--world", "0"), "--world: 0: must be a whole number above 0"),
        ((*DENSE, "--reshard-bucket-mb", "0"), "--reshard-bucket-mb: 0: must be above 0"),
        ((*DENSE, "--intra-node-gbs", "100"), "--intra-node-gbs and --inter-node-gbs .* both or"),
        ((*DENSE, "--json", "no/folder/x.json"), "--json no/folder/x.json: .* make it first"),
        (("--hf-config", "nowhere.json", "--world", "2"), "--hf-config nowhere.json: .* give"),
        (("--world", "2"), "give --hf-config and --world, or --case"),
    ],
)
def test_errors_name_the_flag_and_the_fix(
    flags: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["inspect_plan.py", *flags])
    with pytest.raises(SystemExit) as stopped:
        inspect_plan.main()
    assert stopped.value.code == 2
    assert re.search(said, capsys.readouterr().err.replace("\n", " "))
