"""What the flight recorder keeps, and that it keeps no more than a bounded number of calls."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_rl.platforms import flight_recorder
from mindspeed_rl.platforms.flight_recorder import KEPT, SHOWN, FlightRecorder

RANKS = (4, 6, 9)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FlightRecorder:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: list(RANKS))
    return FlightRecorder()


def group(name: str = "3", title: str = "TENSOR_GROUP") -> Any:
    return SimpleNamespace(group_name=name, group_desc=title)


def call(recorder: FlightRecorder, name: str, *args: Any, of: Any = None) -> Any:
    """A finished call of a method of a group, as torch.distributed makes it; its handle."""
    work = SimpleNamespace()
    method = flight_recorder._recorded(recorder, name, lambda *_: work)
    return method(of or group(), *args)


def test_calls_are_numbered_by_group_and_have_shape_group_and_place(
    recorder: FlightRecorder,
) -> None:
    call(recorder, "allreduce", [torch.zeros(2, 3)])
    call(recorder, "broadcast", [torch.zeros(4, dtype=torch.int64)], of=group("5", "default_pg"))
    call(recorder, "_allgather_base", torch.zeros(8), torch.zeros(4))
    call(recorder, "barrier", of=group("8", "undefined"))
    position = recorder.position()
    assert position.numbers == {"3": 2, "5": 1, "8": 1}
    assert [(c.group, c.operation, c.number) for c in position.last] == [
        ("3", "allgather_base", 2), ("5", "broadcast", 1), ("8", "barrier", 1)
    ]  # fmt: skip
    assert [c.operation for c in position.calls] == ["barrier"] and not position.waits
    first, second, third, fourth = recorder.recent()
    assert str(first).startswith(
        "allreduce no. 1 of tensor_group (ranks 4, 6, 9), float32[2, 3], at platforms/test_flight_"
    )
    assert (second.title, second.number, second.shape) == ("world", 1, "int64[4]")
    assert (third.operation, third.number) == ("allgather_base", 2)
    assert (fourth.title, fourth.shape) == ("engine", "no tensor")


def test_messages_are_not_counted_and_name_the_other_end(recorder: FlightRecorder) -> None:
    call(recorder, "send", [torch.zeros(1)], 2, 0)
    call(recorder, "recv", [torch.zeros(1)], 0, 0)
    assert recorder.position().numbers == {}
    sent, received = recorder.recent()
    assert "send to rank 9 of" in str(sent) and "recv from rank 4 of" in str(received)


def test_a_wait_is_seen_by_another_thread_while_it_lasts(recorder: FlightRecorder) -> None:
    inside, go = threading.Event(), threading.Event()

    def block(work: Any) -> str:
        inside.set()
        go.wait(30.0)
        return "waited"

    wait = flight_recorder._waited(recorder, block)
    first = call(recorder, "allreduce", [torch.zeros(1)])
    call(recorder, "broadcast", [torch.zeros(1)])
    result: list[str] = []
    thread = threading.Thread(target=lambda: result.append(wait(first)))
    thread.start()
    assert inside.wait(30.0)
    assert [(c.operation, c.waits) for c in recorder.position().calls] == [("allreduce", True)]
    go.set()
    thread.join()
    assert result == ["waited"] and not recorder.position().waits
    assert wait(SimpleNamespace()) == "waited", "a handle that is not known is waited for as well"


def test_a_call_that_fails_waits_no_more(recorder: FlightRecorder) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("connection closed")

    with pytest.raises(RuntimeError, match="connection closed"):
        flight_recorder._recorded(recorder, "allreduce", fails)(group(), [torch.zeros(1)])
    assert recorder.position().calls[0].operation == "allreduce"
    assert not recorder.position().waits


def test_memory_is_bounded_and_no_tensor_is_kept(recorder: FlightRecorder) -> None:
    """Handles that nobody waits for are forgotten with their calls."""
    works = [call(recorder, "allreduce", [torch.zeros(1)]) for _ in range(5 * KEPT)]
    assert len(recorder._ring) == KEPT and len(recorder._of_work) <= KEPT
    assert len(recorder.recent()) == SHOWN and recorder.recent()[-1].number == 5 * KEPT
    for work in works:
        recorder.of_work(work)
    assert not recorder._of_work
    entry = recorder._ring[-1]
    assert not any(isinstance(getattr(entry, name), torch.Tensor) for name in entry.__slots__)


def test_what_the_device_has_not_done_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of PyTorch's NCCL flight recorder."""
    assert flight_recorder.device_lines() == [], "a CPU build has none"
    entry = {
        "profiling_name": "nccl:all_reduce", "process_group": ["4", "DATA_PARALLEL_GROUP"],
        "collective_seq_id": 12, "p2p_seq_id": 0, "input_sizes": [[8]], "input_dtypes": ["Float"],
        "state": "started",
    }  # fmt: skip
    done = entry | {"collective_seq_id": 11, "state": "completed"}
    asked: list[tuple[bool, bool]] = []

    def dump(collectives: bool, only_active: bool) -> bytes:
        asked.append((collectives, only_active))
        return json.dumps({"version": "2.10", "entries": [done, *[entry] * (SHOWN + 2)]}).encode()

    module = torch._C._distributed_c10d
    monkeypatch.setattr(module, "_dump_nccl_trace_json", dump, raising=False)
    first, *_, last = flight_recorder.device_lines()
    assert first == ("  nccl:all_reduce no. 12 of 4, DATA_PARALLEL_GROUP, ['Float'] [[8]]: started")
    assert last == "  and 2 more" and asked == [(True, True)]
    monkeypatch.setattr(module, "_dump_nccl_trace_json", lambda *_: b"no json", raising=False)
    (line,) = flight_recorder.device_lines()
    assert line.startswith("  its record cannot be read: JSONDecodeError: ")
