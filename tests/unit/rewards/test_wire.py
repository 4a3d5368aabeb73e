"""What a worker sends is data: whatever it is, it costs a sample at most, and executes nothing."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rewards_support import make_pool, make_requests

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards import RewardResult
from mindspeed_rl.rewards.wire import MAX_BYTES, Ready, Scored, WireError, decode, encode
from mindspeed_rl.rewards.worker_process import worker_environment

FINITE = st.floats(allow_nan=False, allow_infinity=False)
RESULTS = st.builds(
    RewardResult,
    st.integers(),
    st.none() | FINITE,
    st.dictionaries(st.text(), FINITE, max_size=3),
    st.sampled_from(["ok", "error", "timeout"]),
    st.text(),
)
MESSAGES = (
    st.builds(Scored, RESULTS, st.booleans())
    | st.builds(Ready, st.lists(st.text(), max_size=3).map(tuple), st.integers(1, 99))
    | st.builds(UsageError, st.text())
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(MESSAGES)
def test_messages_come_back_as_they_were(message: Ready | Scored | UsageError) -> None:
    back = decode(encode(message))
    assert type(back) is type(message) and str(back) == str(message)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_no_message(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@given(MESSAGES, st.data())
def test_a_message_with_another_value_is_none(
    message: Ready | Scored | UsageError, data: st.DataObject
) -> None:
    """A field is replaced or added: what is read back is a whole message or refused."""
    fields = json.loads(encode(message))
    place = fields
    for _ in range(data.draw(st.integers(0, 2))):
        inner = [key for key, value in place.items() if isinstance(value, dict)]
        if inner:
            place = place[data.draw(st.sampled_from(inner))]
    key = data.draw(st.sampled_from([*place, "more"]))
    place[key] = data.draw(JSON)
    try:
        back = decode(json.dumps(fields).encode())
    except WireError:
        return
    if isinstance(back, Scored):
        result = back.result
        values = [*result.parts.values(), *([] if result.reward is None else [result.reward])]
        assert all(type(value) is float and math.isfinite(value) for value in values)
        assert type(result.sample_id) is int and result.status in ("ok", "error", "timeout")
    elif isinstance(back, Ready):
        assert back.concurrency >= 1 and all(isinstance(n, str) for n in back.notices)


def test_a_long_text_fits_into_a_message() -> None:
    detail = "\ud800" * 10**6
    assert len(encode(Scored(RewardResult(1, None, {}, "error", detail)))) < MAX_BYTES
    assert len(encode(UsageError(detail))) < MAX_BYTES


RUNS = """
import os, pickle, struct, sys, time

class Runs:
    def __reduce__(self):
        return (open, ({note!r}, "w"))

def socket_of_the_pool():
    return next(fd for fd in range(3, 64) if _is_socket(fd))

def _is_socket(fd):
    import stat
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False

def score(request):
    if request.response == "good":
        return 1.0
    data = {{
        "pickle": pickle.dumps(Runs()),
        "json": b'{{"ready": 1}}',
        "huge": b"",
        "part": b"",
    }}[request.response]
    head = {{"huge": 1 << 30, "part": 100}}.get(request.response, len(data))
    os.write(socket_of_the_pool(), struct.pack("!i", head) + data)
    time.sleep(60)
"""


def test_a_worker_that_writes_into_its_socket_costs_its_sample(tmp_path: Path) -> None:
    """A pickle is not loaded, a size is not believed, a message without an end is not awaited."""
    note = tmp_path / "executed"
    file = tmp_path / "mine.py"
    file.write_text(RUNS.format(note=str(note)))
    responses = ["good", "pickle", "good", "json", "huge", "part", "good"]
    with make_pool(f"{file}:score", timeout_s=1.5, max_error_rate=1.0) as pool:
        results = pool.score(make_requests(*responses))
    assert [r.reward for r in results if r.status == "ok"] == [1.0, 1.0, 1.0]
    bad = [r for r in results if r.status != "ok"]
    assert [(r.status, r.reward) for r in bad] == [("error", None)] * 4
    assert all("no message of the pool" in r.detail for r in bad)
    assert not note.exists()


def test_secrets_stay_out_of_the_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secrets = {"HF_TOKEN": "h1", "WANDB_API_KEY": "w1", "AWS_SECRET_ACCESS_KEY": "a1"}
    secrets |= {"MY_PASSWORD": "p1", "SSH_AUTH_SOCK": "/tmp/agent", "OPENAI_API_KEY": "o1"}
    secrets |= {"HTTPS_PROXY": "http://me:pw@proxy:80"}
    plain = {"TOKENIZERS_PARALLELISM": "false", "HTTP_PROXY": "http://proxy:80", "MONKEY": "1"}
    for name, value in (secrets | plain).items():
        monkeypatch.setenv(name, value)
    kept = worker_environment(os.environ, ("OPENAI_API_KEY",))
    assert {n: kept[n] for n in kept.keys() & secrets.keys()} == {"OPENAI_API_KEY": "o1"}
    assert {n: kept[n] for n in plain} == plain
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\ndef score(request):\n    return float(request.response in os.environ)\n"
    )
    with make_pool(f"{file}:score", secrets=("OPENAI_API_KEY",)) as pool:
        results = pool.score(make_requests("HF_TOKEN", "OPENAI_API_KEY", "MONKEY"))
    assert [r.reward for r in results] == [0.0, 1.0, 1.0]
