"""Mistakes of several checks are one error."""

import pytest

from mindspeed_rl.core.errors import Mistakes, UsageError


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
    assert str(error.value) == "--a is refused; --b 1: wrong; --c: missing"


def test_no_mistake_is_no_error_and_other_exceptions_go_on():
    mistakes = Mistakes()
    with pytest.raises(KeyError), mistakes:
        raise KeyError("a")
    mistakes.report()
