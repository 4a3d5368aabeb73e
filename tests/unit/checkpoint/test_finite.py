"""Values that cannot be are found, by name, and all others are let through."""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed_rl.checkpoint.finite import leaves, nonfinite_numbers, problem_of, problems_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_single_wrong_value_is_found(dtype: torch.dtype, wrong: float) -> None:
    values = torch.linspace(-3, 3, 35).to(dtype).view(5, 7)
    assert problem_of(values) == ""
    for row, column in ((0, 0), (2, 3), (4, 6)):
        changed = values.clone()
        changed[row, column] = wrong
        word = "NaN" if math.isnan(wrong) else "infinity"
        assert problem_of(changed) == f"{word} in 1 of 35 values"
        assert problem_of(changed.t()[1:]) == ("" if column == 0 else f"{word} in 1 of 30 values")


def test_large_values_are_wrong_only_where_a_bound_is_given() -> None:
    large = torch.tensor([1.0, -1e38, 1e38])
    assert problem_of(large) == ""
    assert problem_of(large, largest=1e19) == "the value -1e+38"
    assert problem_of(torch.full((3,), 1e19), largest=1.1e19) == ""
    for fine in (torch.zeros(0), torch.tensor([2**62]), torch.tensor([True])):
        assert problem_of(fine, largest=1.0) == ""


def test_the_first_wrong_tensors_are_named() -> None:
    tensors = [(f"t{n}", torch.tensor([math.nan if n % 2 else 0.0])) for n in range(20)]
    named = [problem.partition(":")[0] for problem in problems_of(tensors)]
    assert named == ["t1", "t3", "t5"]


def test_numbers_of_a_record_are_found_by_their_path() -> None:
    record = {
        "kl_beta": 0.1,
        "lengths": {"mean": math.nan, "known": [1.0, math.inf]},
        "carryover": [[{"reward": math.nan, "parts": [math.nan], "columns": {"p": [-math.inf]}}]],
        "name": "nan",
        "tensors": {"p": torch.tensor([0.5, -math.inf]), "n": torch.tensor([1, 2])},
        "parts": torch.tensor([math.nan]),
    }
    assert nonfinite_numbers(record, ("reward", "parts")) == [
        "lengths.mean is nan",
        "lengths.known.1 is inf",
        "carryover.0.0.columns.p.0 is -inf",
        "tensors.p has infinity in 1 of 2 values",
    ]
    assert dict(leaves({"a": [1, {"b": (2,)}], 3: "xy"})) == {
        ("a", 0): 1,
        ("a", 1, "b", 0): 2,
        (3,): "xy",
    }
