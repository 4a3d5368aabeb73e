"""The planter of faults: what it says of a fault that is killed, survives or was never planted."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import run
from faults.planting import Fault, gives
from faults.table import FAULTS

_HERE = "tests/unit/repository/test_faults.py::"
_TARGET = "mindspeed_rl.algorithms.pass_at_k:pass_at_k"
_STRONG = _HERE + "test_one_of_two_is_right"


def _negated(value: float) -> float:
    return -value


def _raises(original: object) -> object:
    return lambda *_, **__: {}["missing"]


#: name -> verdict of the runner
EXPECTED = {
    "is-killed": "killed",
    "is-too-weakly-tested": "ALIVE",
    "is-never-called": "never reached",
    "is-nowhere": "broken",
    "raises-itself": "broken",
}


def _row(name: str, target: str = _TARGET, test: str = _STRONG, **rest: object) -> Fault:
    return Fault(name, target, rest.get("change", gives(_negated)), test, "It is made up.")  # type: ignore[arg-type]


ROWS = (
    _row("is-killed"),
    _row("is-too-weakly-tested", test=_HERE + "test_that_looks_at_the_size_alone"),
    _row("is-never-called", test=_HERE + "test_of_something_else"),
    _row("is-nowhere", "mindspeed_rl.algorithms.pass_at_k:renamed"),
    _row("raises-itself", change=_raises),
)


def test_one_of_two_is_right() -> None:
    from mindspeed_rl.algorithms.pass_at_k import pass_at_k

    assert pass_at_k(2, 1, 1) == 0.5


def test_that_looks_at_the_size_alone() -> None:
    from mindspeed_rl.algorithms.pass_at_k import pass_at_k

    assert abs(pass_at_k(2, 1, 1)) == 0.5


def test_of_something_else() -> None:
    """Imports the target, but never calls it."""
    import mindspeed_rl.algorithms.pass_at_k as module

    assert module.pass_at_k


def test_the_runner_tells_what_became_of_each_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a fork of its own; one that is not killed makes the exit status 1."""
    (tmp_path / "made_up_faults.py").write_text(
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('rows', {__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "FAULTS = module.ROWS\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the forking process
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run.main(["--table", "made_up_faults", "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    for name, verdict in EXPECTED.items():
        assert f"{verdict}  {name}  " in printed
    assert "1 of 5 faults killed" in printed
    assert "renamed does not exist" in printed


def test_names_are_unique_and_tests_exist() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    root = Path(__file__).resolve().parents[3]
    for fault in FAULTS:
        file, _, test = fault.test.partition("::")
        assert f"def {test.partition('[')[0]}(" in (root / file).read_text(), fault.name
