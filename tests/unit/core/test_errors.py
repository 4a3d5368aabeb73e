"""Mistakes of several checks are one error."""

import pickle
from functools import partial

import pytest

from mindspeed_rl.core.errors import Mistakes, UsageError, check_each, refuse


def test_every_mistake_is_reported_once_and_in_order():
    mistakes = Mistakes(["--a is refused"])
    seen = []
    with mistakes:
        raise UsageError("--b 1: wrong")
    with mistakes:
        seen.append("a check without a mistake")
    for _ in range(2):
        with mistakes:
            raise UsageError("--c: missing")
    assert seen
    with pytest.raises(UsageError) as error:
        mistakes.report()
    assert error.value.mistakes == ("--a is refused", "--b 1: wrong", "--c: missing")
    assert str(error.value).splitlines()[1:] == [
        "  - --a is refused",
        "  - --b 1: wrong",
        "  - --c: missing",
    ]


def test_checks_run_on_behind_a_mistake_and_nested_ones_are_flat():
    def fails(*texts: str) -> None:
        check_each(*(partial(refuse, [text]) for text in texts))

    with pytest.raises(UsageError) as error:
        check_each(partial(fails, "--a", "--b"), list, partial(fails, "--b", "--c"))
    assert error.value.mistakes == ("--a", "--b", "--c")
    with pytest.raises(ZeroDivisionError):
        check_each(partial(fails, "--a"), lambda: 1 / 0)


def test_what_ends_nothing_alone_is_told_first_beside_what_does():
    Mistakes().report(["--a is refused"])
    with pytest.raises(UsageError) as error:
        Mistakes(["--b", "--a is refused"]).report(["--a is refused"])
    assert error.value.mistakes == ("--a is refused", "--b")


def test_one_mistake_is_its_own_line():
    assert str(UsageError("--a 1: wrong")) == "--a 1: wrong"
    assert pickle.loads(pickle.dumps(UsageError("--a", "--b"))).mistakes == ("--a", "--b")


def test_no_mistake_is_no_error_and_other_exceptions_go_on():
    mistakes = Mistakes()
    with pytest.raises(KeyError), mistakes:
        raise KeyError("a")
    mistakes.report()
