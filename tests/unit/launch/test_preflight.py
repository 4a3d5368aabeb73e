"""The doctor on the groups of a run: their memory, and what hangs."""

from __future__ import annotations

from support.published import PUBLISHED

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.diagnosis.rows import DoctorRow, Status
from mindspeed_rl.doctor import layout_rows
from mindspeed_rl.launch import bootstrap
from mindspeed_rl.launch.preflight import GroupResult, RankReport, preflight_rows
from mindspeed_rl.planning.communicators import RunGroups


def reds(rows: list[DoctorRow]) -> list[DoctorRow]:
    return [row for row in rows if row.status is Status.RED]


LAYOUT = f"""--hf-checkpoint {PUBLISHED["qwen3-30b-a3b"]} --prompt-data x --train-iters 1
    --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2
    --expert-tensor-parallel-size 1 --rollout-tp 2 --rollout-max-response-length 8
    --grpo-prompts-per-step 8 --rl-world-size 8 --rollout-kv-cache-gb 1""".split()


def test_groups_of_the_run_and_their_memory_are_told() -> None:
    config = parse(RLRunConfig, LAYOUT, "t").config
    plan, (row,) = layout_rows(config, "npu", bootstrap.World(0, 1, 0, 1))
    assert plan is not None and row.status is Status.NOTE
    assert "tp 400, " in row.what and "MiB in all (predicted)" in row.what
    axes = RunGroups.of(config, plan).of_all_ranks()
    assert axes["tp"] == axes["ep"] == axes["rollout tp"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    for name, groups in axes.items():
        members = [rank for group in groups for rank in group]
        assert len(members) == len(set(members)), f"{name}: a rank is in one group"


def test_a_layout_that_is_not_possible_is_red() -> None:
    wrong = [*LAYOUT, "--tensor-model-parallel-size", "3"]
    config = parse(RLRunConfig, wrong, "t").config
    plan, (row,) = layout_rows(config, "npu", bootstrap.World(0, 1, 0, 1))
    assert plan is None and row.status is Status.RED and "3" in row.what


AXES = {"world": ((0, 1, 2, 3),), "tp": ((0, 1), (2, 3))}


def reports(*tp_results: GroupResult | None) -> dict[int, RankReport]:
    found = {}
    for rank, tp in enumerate(tp_results):
        results = {"world": GroupResult(0.1 * rank, 2**20)}
        found[rank] = RankReport(f"node{rank // 2}", results | ({"tp": tp} if tp else {}))
    return found


def test_groups_that_answer_are_green_with_time_and_memory() -> None:
    all_in = reports(*(GroupResult(0.5, 4 * 2**20) for _ in range(4)))
    world, tp = preflight_rows(AXES, all_in, dict.fromkeys(range(4), "tp"), 60)
    assert "1 x 4 ranks" in world.what and "slowest 0.30 s, 1 MiB" in world.what
    assert "2 x 2 ranks" in tp.what and tp.status is Status.GREEN


def test_a_group_that_hangs_is_named_with_who_is_not_in_it() -> None:
    """Rank 3 is stuck elsewhere: it never entered tp, and never told anything."""
    stuck = reports(GroupResult(0.1, 0), GroupResult(0.1, 0), GroupResult(60, 0, "no answer"))
    rows = list(preflight_rows(AXES, stuck, {0: "tp", 1: "tp", 2: "tp", 3: "world"}, 60))
    (row,) = reds(rows)
    assert row.what.startswith("tp of ranks 2, 3: no answer")
    assert "not in it: rank 3" in row.what and "node1" in row.fix


def test_a_rank_that_says_nothing_is_named() -> None:
    three = reports(*(GroupResult(0.1, 0) for _ in range(3)))
    rows = list(preflight_rows(AXES, three, {0: "tp", 1: "tp", 2: "tp"}, 60))
    (row,) = reds(rows)
    assert row.what.startswith("rank 3 said nothing in 60 s") and "none" in row.what
