"""Which rank is missing in which collective, from what the ranks say."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from mindspeed_rl.core.flights import Call, Position, recent_lines, stuck_lines, stuck_text

GRADIENTS = Call(
    "4", "data_parallel_group", (0, 1, 2, 3), 12, "allreduce", "float32[8]", -1, "a.py:7", True, 9.0
)
TENSOR = Call("9", "tensor_group", (2, 3), 5, "broadcast", "int64[1]", -1, "b.py:3", True, 8.0)
RECEIVE = Call("6", "pipeline_group", (0, 1), 0, "recv", "float32[2]", 0, "c.py:1", True, 7.0)
PHASES = dict.fromkeys(range(4), "train")


def at(call: Call, **numbers: int) -> Position:
    """A rank whose last call it was."""
    return Position({call.group: call.number, **numbers}, (call,))


def idle(call: Call) -> Position:
    return at(replace(call, waits=False))


def test_a_rank_that_does_not_come_is_named_with_what_it_does() -> None:
    late = idle(replace(GRADIENTS, number=11, where="d.py:5"))
    positions = {rank: at(GRADIENTS) for rank in (0, 1, 3)} | {2: late}
    (line,) = stuck_lines(positions, PHASES | {2: "reward"})
    assert line == (
        "rank 0-1, 3 wait in allreduce no. 12 of data_parallel_group (ranks 0-3), float32[8], at "
        "a.py:7; missing there: rank 2; rank 2 (phase reward) is in no collective; its last was "
        "allreduce no. 11 of data_parallel_group (ranks 0-3), float32[8], at d.py:5"
    )


def test_a_rank_without_an_answer_is_missing() -> None:
    (line,) = stuck_lines({rank: at(GRADIENTS) for rank in (0, 1, 2)}, PHASES)
    assert line.endswith("missing there: rank 3; rank 3 (phase train) gives no answer")


def test_a_rank_in_another_collective_is_named_with_it() -> None:
    """Ranks that wait for each other: both waits are told."""
    positions = {
        0: at(GRADIENTS), 1: at(GRADIENTS), 2: at(GRADIENTS, **{"9": 4}),
        3: Position({"4": 11, "9": 5}, (TENSOR,)),
    }  # fmt: skip
    first, second = stuck_lines(positions, PHASES)
    assert "rank 0-2 wait in allreduce no. 12" in first and "missing there: rank 3; " in first
    assert "rank 3 (phase train) waits in broadcast no. 5 of tensor_group (ranks 2-3)" in first
    assert "rank 3 waits in broadcast no. 5" in second and "missing there: rank 2; " in second


def test_the_rank_that_waits_for_nobody_comes_first() -> None:
    """Others wait in a chain for it."""
    positions = {
        0: at(GRADIENTS), 1: at(GRADIENTS), 2: Position({"4": 11, "9": 5}, (TENSOR,)),
        3: idle(replace(TENSOR, number=4)),
    }  # fmt: skip
    first, second = stuck_lines(positions, PHASES)
    assert first.startswith("rank 2 waits in broadcast no. 5") and "rank 3 (phase" in first
    assert second.startswith("rank 0-1 wait in allreduce no. 12")


def test_a_rank_that_has_left_the_collective_is_not_missing() -> None:
    ahead = idle(replace(GRADIENTS, number=13))
    positions = {0: at(GRADIENTS), 1: at(GRADIENTS), 2: ahead, 3: idle(GRADIENTS)}
    (line,) = stuck_lines(positions, PHASES)
    assert "missing" not in line


def test_a_receive_without_a_send_names_the_other_end() -> None:
    """A stage with one micro-batch more than the stage before it."""
    positions = {
        1: at(RECEIVE), 0: at(replace(GRADIENTS, ranks=(0, 1))),
    }  # fmt: skip
    lines = stuck_lines(positions, PHASES)
    assert (
        lines[0].startswith("rank 0 waits in allreduce no. 12")
        and "missing there: rank 1" in (lines[0])
    )
    assert lines[1].startswith("rank 1 waits in recv from rank 0 of pipeline_group (ranks 0-1)")
    assert "rank 0 (phase train) waits in allreduce no. 12" in lines[1]


def test_another_call_in_the_same_place_is_told() -> None:
    other = replace(GRADIENTS, operation="broadcast", where="e.py:2")
    (line,) = stuck_lines({0: at(GRADIENTS), 1: at(other), 2: at(GRADIENTS), 3: at(other)}, PHASES)
    assert "but rank 1 calls broadcast, float32[8], at e.py:2; but rank 3" in line


def begun(*calls: Call) -> Position:
    """A rank whose calls have returned, as they do at once on devices."""
    calls = tuple(replace(call, waits=False) for call in calls)
    return Position({call.group: call.number for call in calls}, calls[-1:], calls)


def test_nobody_waits_and_all_are_in_step() -> None:
    both = {0: begun(RECEIVE), 1: begun(RECEIVE)}
    assert stuck_text(both, PHASES) == ""
    assert stuck_text({rank: begun(GRADIENTS) for rank in range(4)}, PHASES) == ""
    assert stuck_text({0: Position({}, ()), 1: Position({}, ())}, PHASES) == ""


def test_where_nobody_waits_the_rank_that_is_behind_is_named() -> None:
    """Before a device collective: waits return at once, numbers tell."""
    late = begun(replace(GRADIENTS, number=11, shape="float32[4]", where="d.py:5"))
    positions = {rank: begun(GRADIENTS) for rank in (0, 1, 3)} | {2: late}
    (line,) = stuck_lines(positions, PHASES | {2: "reward"})
    assert line == (
        "nobody waits on the host; rank 0-1, 3 have begun allreduce no. 12 of data_parallel_group "
        "(ranks 0-3), float32[8], at a.py:7; behind: rank 2; the last that rank 2 (phase reward) "
        "began there is allreduce no. 11, float32[4], at d.py:5"
    )
    positions[2] = begun()
    assert stuck_lines(positions, PHASES)[0].endswith("rank 2 (phase train) has begun none there")
    del positions[2]
    assert stuck_lines(positions, PHASES)[0].endswith("rank 2 (phase train) gives no answer")


def test_the_rank_that_is_ahead_nowhere_comes_first() -> None:
    """Rank 2 waits on its device for rank 3 and is therefore late in the gradients of all."""
    before = replace(GRADIENTS, number=11)
    positions = {
        0: begun(GRADIENTS), 1: begun(GRADIENTS), 2: begun(before, TENSOR),
        3: begun(before, replace(TENSOR, number=4)),
    }  # fmt: skip
    first, second = stuck_lines(positions, PHASES)
    assert "rank 2 has begun broadcast no. 5" in first and "behind: rank 3; " in first
    assert "rank 0-1 have begun allreduce no. 12" in second and "behind: rank 2-3; " in second


def test_another_collective_with_the_same_number_is_told_where_nobody_waits() -> None:
    other = replace(GRADIENTS, operation="broadcast", where="e.py:2")
    positions = {0: begun(GRADIENTS), 1: begun(other), 2: begun(GRADIENTS), 3: begun(GRADIENTS)}
    (line,) = stuck_lines(positions, PHASES)
    assert line.endswith("but rank 1 calls broadcast, float32[8], at e.py:2")
    uneven = replace(GRADIENTS, operation="all_to_all_single")
    positions = {rank: begun(replace(uneven, shape=f"float32[{rank}]")) for rank in range(4)}
    assert stuck_lines(positions, PHASES) == []


def test_of_many_waits_the_first_are_told() -> None:
    """A thousand ranks make no thousand lines."""
    calls = [replace(RECEIVE, peer=rank - 1) for rank in range(1, 1001)]
    positions = {rank: at(call) for rank, call in enumerate(calls, 1)} | {0: Position({}, ())}
    lines = stuck_lines(positions, {})
    assert len(lines) == 5 and lines[-1] == "and 996 more such waits"
    assert lines[0].startswith("rank 1 waits in recv from rank 0") and "no collective" in lines[0]


def test_a_position_survives_the_store() -> None:
    position = replace(at(TENSOR, **{"4": 11}), last=(TENSOR, GRADIENTS))
    assert Position.from_json(json.loads(json.dumps(asdict(position)))) == position
    assert recent_lines([GRADIENTS]) == [f"  9.0 s ago, waits: {GRADIENTS}"]
