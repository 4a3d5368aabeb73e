"""Unit tests of a program, in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeGuard

from mindspeed_rl.config.rewards import RewardConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards import sandbox
from mindspeed_rl.rewards.types import BuiltInReward, RewardRequest

TESTS_KEY = "tests"
_FILE_BYTES = 16 << 20  # size of the largest file that a program may write, its output included
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)

# The harness reads the test before the solution runs. A program that just ends, however early and
# with whatever exit code, does not know the word that proves that the test was reached and passed.
_HARNESS = """
import json, sys
def main():
    message = json.loads(sys.stdin.readline())
    test, word, output = message["test"], message["word"], sys.stdout
    scope = {"__name__": "solution"}
    with open("solution.py") as file:
        exec(compile(file.read(), "solution.py", "exec"), scope)
    exec(compile(test, "test", "exec"), scope)
    output.write("\\n" + word)
    output.flush()
main()
"""


@dataclass(frozen=True, slots=True)
class UnitTest:
    """One test: a program that must not raise after the solution, or input and expected output."""

    program: str | None = None
    stdin: str = ""
    stdout: str = ""


def extract_program(response: str) -> str:
    """Return the last fenced block of Python, or the whole response if it has none."""
    blocks: list[str] = _BLOCK.findall(response)
    return blocks[-1] if blocks else response


def parse_tests(value: object) -> list[UnitTest]:
    """Parse the tests of a data row.

    Args:
        value: A Python program of assertions; a list of such; or ``{"inputs": [...], "outputs":
            [...]}``, what the program reads from standard input and must print. A JSON text of one
            of these is read as well.

    Raises:
        UsageError: the value is something else, or has no test at all.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with suppress(json.JSONDecodeError):  # a program that begins with a list
            value = json.loads(value)
    if isinstance(value, str) and value.strip():
        return [UnitTest(value)]
    if isinstance(value, Mapping):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if _is_texts(inputs) and _is_texts(outputs) and len(inputs) == len(outputs) > 0:
            return [UnitTest(None, i, o) for i, o in zip(inputs, outputs, strict=True)]
    elif _is_texts(value) and value:
        return [UnitTest(program) for program in value]
    raise UsageError(
        f"must be a text of assertions, a list of such, or "
        f'{{"inputs": [...], "outputs": [...]}} of equally many texts; got {value!r:.200}'
    )


def _is_texts(value: object) -> TypeGuard[Sequence[str]]:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(v, str) for v in value)
    )


class CodeReward:
    """Runs the program in a response against the tests of its row.

    A program that fails, hangs, or exceeds a limit does not pass that test; what is wrong with the
    tests or the sandbox is an error and not a 0.

    Attributes:
        notice: Restrictions of programs on this machine, for the log.
    """

    def __init__(self, flags: RewardConfig) -> None:
        self._all_must_pass = flags.reward_code_score == "all"
        self._limits = sandbox.SandboxLimits(
            flags.reward_code_time_limit_s,
            int(flags.reward_code_memory_gb * 2**30),
            flags.reward_code_processes,
            _FILE_BYTES,
        )
        self._restrictions = sandbox.probe(self._limits)
        self.notice = f"reward 'code': {self._restrictions.describe()}"
        left = self._restrictions.left_open
        if refused := [name for name in left if name not in flags.reward_code_allow_open]:
            reach = "; ".join(f"{name}: {sandbox.OPEN[name]}" for name in refused)
            raise UsageError(
                "--reward-function code: on this machine the kernel lets no sandbox close what "
                f"programs of the model could then reach: {reach}. Allow user namespaces, landlock "
                "and seccomp in the container, or accept it with --reward-code-allow-open "
                f"{' '.join(left)}"
            )

    def __call__(self, request: RewardRequest) -> float:
        """Return 1.0 when all tests pass (or the part that passes, see ``--reward-code-score``).

        Raises:
            UsageError: the row has no usable tests.
            SandboxError: the sandbox does not work.
        """
        try:
            tests = parse_tests(request.metadata.get(TESTS_KEY))
        except ValueError as error:
            raise UsageError(
                f"reward 'code': metadata {TESTS_KEY!r} of sample {request.sample_id} {error}"
            ) from error
        program = extract_program(request.response)
        if self._all_must_pass:
            return float(all(self._passes(program, test) for test in tests))
        return sum(self._passes(program, test) for test in tests) / len(tests)

    def _passes(self, program: str, test: UnitTest) -> bool:
        if test.program is None:
            files = {"solution.py": program}
            ended = self._run(["solution.py"], test.stdin, files)
            return ended.exit_code == 0 and _lines(ended.stdout) == _lines(test.stdout)
        word = secrets.token_hex(16)
        message = json.dumps({"test": test.program, "word": word}) + "\n"
        ended = self._run(["harness.py"], message, {"solution.py": program, "harness.py": _HARNESS})
        return ended.exit_code == 0 and ended.stdout.endswith("\n" + word)

    def _run(self, arguments: list[str], stdin: str, files: dict[str, str]) -> sandbox.Ended:
        return sandbox.run_python(arguments, stdin, files, self._limits, self._restrictions)


def _lines(text: str) -> list[str]:
    """Split text into lines without white space at the ends of lines and of the text."""
    return [line.rstrip() for line in text.strip().splitlines()]


REWARD = BuiltInReward(lambda settings: CodeReward(settings.flags), columns=(TESTS_KEY,), verdict=2)
