"""Unit tests of programs in a sandbox: verdicts, limits, isolation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.rewards_support import children, make_pool, settings, wait_for

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards import RewardRequest, WeightedReward
from mindspeed_rl.rewards.builtin.code import CodeReward, extract_program, parse_tests
from mindspeed_rl.rewards.sandbox import Restrictions
from mindspeed_rl.rewards.scoring import score_sample

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")


@pytest.fixture(scope="module")
def code() -> CodeReward:
    return code_reward(time_limit_s=2.0, memory_gb=0.25, processes=8)


ALL_OPEN = ("network", "files", "processes")


def code_reward(allow_open: tuple[str, ...] = ALL_OPEN, **flags: Any) -> CodeReward:
    """The reward, on a machine that may close nothing."""
    named = {f"code_{k}": v for k, v in (flags | {"allow_open": allow_open}).items()}
    return CodeReward(settings("code", **named).flags)


def passes(code: CodeReward, program: str, tests: object = ("assert f() == 1",)) -> float:
    return code(RewardRequest(3, "", program, "", "stop", 9, {"tests": tests}))


def test_assertions_of_a_function(code: CodeReward) -> None:
    right = "Here:\n```python\nx = 1\n```\nand\n```python\ndef f(): return 1\n```\nDone."
    assert passes(code, right) == 1.0
    assert passes(code, "def f(): return 2") == 0.0
    assert passes(code, "def f(): return") == passes(code, "no python at all") == 0.0
    assert passes(code, "def f(): return 1", "assert f() == 1\nassert f() == 2") == 0.0


def test_input_and_output(code: CodeReward) -> None:
    tests = {"inputs": ["2 3\n", "4 5"], "outputs": ["5", "9\n"]}
    assert passes(code, "print(sum(map(int, input().split())), ' ')", tests) == 1.0
    assert passes(code, "print(5)", tests) == 0.0
    assert passes(code, "print(5); raise SystemExit(3)", tests) == 0.0


def test_a_share_of_the_tests() -> None:
    code = code_reward(score="fraction")
    tests = '["assert f() == 1", "assert f() == 2", "assert f() > 0", "assert f() < 9"]'
    assert passes(code, "def f(): return 1", tests) == 0.75


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "import sys; sys.stdout.write('passed'); sys.exit()",
    ],
)
def test_a_program_that_ends_early_does_not_pass(code: CodeReward, program: str) -> None:
    assert passes(code, program, "assert True") == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "x = bytearray(10 << 30)",
        "import ctypes; ctypes.string_at(0)",
        "open('big', 'wb').write(bytes(64 << 20))",
        "print('x' * (64 << 20))",
    ],
    ids=["loop", "sleep", "memory", "segfault", "file", "output"],
)
def test_limits_hold_and_cost_the_test_only(code: CodeReward, program: str) -> None:
    before = children()
    assert passes(code, f"{program}\ndef f(): return 1") == 0.0
    assert children() == before


def test_what_a_program_starts_ends_with_it(code: CodeReward) -> None:
    """Also when it leaves its session; needs a process namespace."""
    if "no processes of its own" in code.notice:
        pytest.skip(f"namespaces are forbidden here: {code.notice}")
    program = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.execv('/bin/sleep', "
        "['mindspeed-rl-left-over', '300'])\ntime.sleep(0.2)\ndef f(): return 1"
    )
    assert passes(code, program) == 1.0
    assert wait_for(lambda: not running("mindspeed-rl-left-over"), 5.0)


def running(name: str) -> bool:
    return any((p.info["cmdline"] or [""])[0] == name for p in psutil.process_iter(["cmdline"]))


def test_what_is_said_to_be_closed_is_closed(code: CodeReward, tmp_path: Path) -> None:
    secret = tmp_path / "answers.jsonl"
    secret.write_text("42")
    attacks = {
        "no network": "import socket\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('192.0.2.1', 9))",
        "files outside its folder closed": f"open({str(secret)!r}).read()",
    }
    for said, attack in attacks.items():
        assert passes(code, f"{attack}\ndef f(): return 1") == float(said not in code.notice)
    write = f"open({str(tmp_path / 'x')!r}, 'w')\ndef f(): return 1"
    assert passes(code, write) == float("FILES ARE OPEN" in code.notice)
    bomb = "import os, time\nfor _ in range(50):\n    if os.fork() == 0: time.sleep(9)\n"
    limited = "PROCESSES IS NOT LIMITED" not in code.notice
    assert passes(code, f"{bomb}def f(): return 1") == float(not limited)


def test_what_stays_open_needs_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that closes nothing is refused, and says what a program could reach."""
    nothing = Restrictions(counted=False, namespaces=False, files=False, calls=False)
    monkeypatch.setattr("mindspeed_rl.rewards.sandbox.probe", lambda limits: nothing)
    wanted = "--reward-code-allow-open network files processes"
    with pytest.raises(UsageError, match=f"every file of this user.*{wanted}"):
        code_reward(allow_open=())
    with pytest.raises(UsageError, match=f"files: every file.*{wanted}"):
        code_reward(allow_open=("network", "processes"))
    notice = code_reward().notice
    assert "THE NETWORK IS OPEN; FILES ARE OPEN; PROCESSES ARE OPEN" in notice


def test_bad_tests_and_a_broken_sandbox_are_errors_and_no_zero(
    code: CodeReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = [WeightedReward("code", 1.0, code)]
    for tests in (None, "", [], [3], {"inputs": ["1"]}, {"inputs": [], "outputs": []}):
        result = score_sample(
            reward, RewardRequest(3, "", "def f(): pass", "", "stop", 1, {"tests": tests})
        )
        assert (result.status, result.reward) == ("error", None)
        assert "metadata 'tests' of sample 3 must be" in result.detail
    monkeypatch.setattr("mindspeed_rl.rewards.sandbox._LAUNCHER", "/nowhere/launcher.py")
    broken = score_sample(
        reward, RewardRequest(3, "", "def f(): return 1", "", "stop", 1, {"tests": "assert f()"})
    )
    assert (broken.status, broken.reward) == ("error", None), broken


def test_programs_and_tests_are_read() -> None:
    assert extract_program("```py\na\n```x```Python\nb\n```") == "b\n"
    assert extract_program("print(1)") == "print(1)"
    assert len(parse_tests('{"inputs": ["1", "2"], "outputs": ["1", "2"]}')) == 2
    assert parse_tests("[1, 2]\nassert x")[0].program == "[1, 2]\nassert x"


def test_the_pool_reports_the_notice() -> None:
    with make_pool("code", code_allow_open=ALL_OPEN) as pool:
        assert pool.notices[0].startswith("reward 'code': programs run with ")
        sample = RewardRequest(0, "", "def f(): return 1", "", "stop", 1, {"tests": "assert f()"})
        assert [r.reward for r in pool.score([sample])] == [1.0]
