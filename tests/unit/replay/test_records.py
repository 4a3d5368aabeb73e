"""Records: merged from the parts of ranks, kept in a file, compared."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.replay.compare import changed_flags, differences
from mindspeed_rl.replay.record import (
    TARGETS,
    TOKENS,
    PassPart,
    RecordStage,
    SampleStage,
    StepRecord,
    TensorStage,
    TokenStage,
    TokenValues,
    merged_stages,
    read_record,
    save_record,
)


def tokens(name: str, *rows: tuple[int, int, Any], dtype: Any = np.float32) -> TokenStage:
    sample, place, value = zip(*rows, strict=True)
    return TokenStage(name, np.array(sample), np.array(place), np.array(value, dtype=dtype))


def digest(norm: float, *projections: float) -> list[float]:
    return [norm * norm, *projections, *([0.0] * (8 - len(projections)))]


def make_record(*stages: RecordStage) -> StepRecord:
    return StepRecord(3, {"tp": 2, "engines": 1}, {"--lr": "0.001"}, stages)


STAGES = (
    tokens("tokens", (0, 0, 5), (0, 1, 7), (2, 0, 9), dtype=np.int64),
    tokens("log-probs", (0, 1, -0.5), (2, 1, math.nan)),
    SampleStage(
        "hidden", np.array([0, 2]), np.array([0, 1]), np.array([digest(2, 1), digest(4, 3)])
    ),
    TensorStage("gradient", np.array(["b", "a"]), np.array([digest(1, 1), digest(9, 2)]), False),
    TensorStage("change", np.array(["a"]), np.array([digest(1, 1)]), True),
)


def changed(number: int, **fields: Any) -> StepRecord:
    stages = list(STAGES)
    stages[number] = replace(stages[number], **fields)
    return make_record(*stages)


def test_a_record_comes_back_from_its_file(tmp_path: Path) -> None:
    record, path = make_record(*STAGES), tmp_path / "new" / "record.npz"
    save_record(record, path)
    found = read_record(path)
    assert (found.step, found.layout, found.flags) == (3, record.layout, record.flags)
    assert differences(found, record, 0.0) == [] and found.num_values == 3 + 2 + 2 + 2 + 1
    assert [type(s) for s in found.stages] == [type(s) for s in STAGES]
    assert [s.is_update for s in found.stages if isinstance(s, TensorStage)] == [False, True]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"text", None])
def test_a_file_that_is_no_record_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "record.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=str(path)):
        read_record(path)
    np.savez(path, header=np.array("{}"))
    with pytest.raises(UsageError, match=str(path)):
        read_record(path)
    np.savez(path, header=np.array([{"pickled": 1}], dtype=object))
    with pytest.raises(UsageError, match=str(path)):
        read_record(path)


@pytest.mark.parametrize(
    ("number", "fields", "stage", "where"),
    [
        (0, {"value": np.array([5, 8, 9])}, "tokens", "sample 0, token 1"),
        (1, {"value": np.array([-0.5, 1.0], np.float32)}, "log-probs", "sample 2, token 1"),
        (2, {"digest": np.array([digest(2, 1), digest(4, 5)])}, "hidden",
         "sample 2, computed by rank 1"),
        (3, {"digest": np.array([digest(2, 2), digest(9, 2)])}, "gradient", "b"),
        (4, {"digest": np.array([digest(2, 1)])}, "change", "a"),
    ],
)  # fmt: skip
def test_the_first_difference_of_a_stage_is_named(
    number: int, fields: dict[str, Any], stage: str, where: str
) -> None:
    (found,) = differences(changed(number, **fields), make_record(*STAGES), 0.0)
    assert (found.stage, found.where) == (stage, where)
    assert str(found).startswith(f"{stage}: {where}: ")


def test_differences_come_in_the_order_of_the_computation() -> None:
    mine = make_record(*changed(3, tensor=np.array(["c", "a"])).stages[:2], *STAGES[3:])
    other = changed(1, value=np.array([-0.6, math.nan], np.float32))
    found = differences(mine, other, 0.0)
    assert [d.stage for d in found] == ["log-probs", "hidden"]
    assert found[1].where == "only in the other record"


def test_a_token_that_only_one_has_comes_at_its_place() -> None:
    other = make_record(tokens("tokens", (0, 0, 5), (2, 0, 9), (2, 1, 1), dtype=np.int64))
    mine = make_record(STAGES[0])
    (found,) = differences(mine, other, 0.0)
    assert (found.where, found.values) == ("sample 0, token 1", "only in this replay")
    wrong = make_record(tokens("tokens", (0, 0, 4), (2, 0, 9), (2, 1, 1), dtype=np.int64))
    assert differences(mine, wrong, 0.0)[0].where == "sample 0, token 0"


def test_a_tolerance_is_relative_and_never_for_tokens() -> None:
    base = make_record(*STAGES)
    near = {
        1: {"value": np.array([-0.5004, math.nan], np.float32)},
        2: {"digest": np.array([digest(2, 1), digest(4, 3.001)])},
        3: {"digest": np.array([digest(1, 1.05), digest(9, 2)])},  # of a norm of 9 in all
        4: {"digest": np.array([digest(1.004, -1)])},
    }
    for number, fields in near.items():
        assert len(differences(changed(number, **fields), base, 0.0)) == 1
        assert differences(changed(number, **fields), base, 0.05) == []
    assert len(differences(changed(3, **near[3]), base, 1e-3)) == 1
    assert len(differences(changed(4, digest=np.array([digest(1.02, 1)])), base, 1e-3)) == 1
    assert len(differences(changed(0, value=np.array([5, 8, 9])), base, 1.0)) == 1
    for value in (math.nan, math.inf):
        wrong = changed(2, digest=np.array([digest(2, 1), digest(4, value)]))
        assert len(differences(wrong, base, 1e3)) == 1


def test_changed_flags_are_told_with_both_values() -> None:
    found = list(changed_flags({"--lr": "2", "--bf16": "True"}, {"--lr": "1", "--seed": "4"}))
    assert found == ["--bf16 True (was unset)", "--lr 2 (was 1)", "--seed unset (was 4)"]


def values(*rows: tuple[int, int, float]) -> TokenValues:
    sample, place, value = zip(*rows, strict=True)
    return TokenValues(np.array(sample), np.array(place), np.array(value))


def test_the_parts_of_ranks_become_one_record() -> None:
    """Two ranks share a sequence and its layer; the second has a sequence and a tensor alone."""
    one, two = np.array(digest(3, 1)), np.array(digest(4, 2))
    ranks = [
        PassPart(
            "policy update 1",
            columns={TOKENS: [values((0, 0, 5), (0, 1, 6))], TARGETS: [values((0, 2, 7))]},
            hidden={1: {0: one}},
            outputs={"log-probs": [values((0, 2, -1.0))]},
            gradients={"b": one},
            updates={"b": one},
        ),
        PassPart(
            "policy update 1",
            columns={
                TOKENS: [values((0, 2, 7), (3, 0, 1))],
                TARGETS: [values((0, 3, 8), (3, 1, 2))],
            },
            hidden={1: {0: two, 3: two}},
            outputs={"log-probs": [values((3, 1, -3.0), (0, 3, -2.0))]},
            gradients={"a": two, "b": two},
        ),
    ]
    prompts, responses, hidden, logprobs, gradient, change = merged_stages(
        [[ranks[0]], [ranks[1]]], {"policy": ["a", "b", "c"]}
    )
    assert isinstance(prompts, TokenStage) and isinstance(responses, TokenStage)
    assert prompts.value.tolist() == [5, 6, 1] and responses.value.tolist() == [7, 8, 2]
    assert responses.place.tolist() == [2, 3, 1] and responses.sample.tolist() == [0, 0, 3]
    assert isinstance(hidden, SampleStage) and hidden.name.endswith("after layer 1")
    assert hidden.rank.tolist() == [0, 1] and np.array_equal(hidden.digest, [one + two, two])
    assert isinstance(logprobs, TokenStage) and logprobs.value.tolist() == [-1.0, -2.0, -3.0]
    assert isinstance(gradient, TensorStage) and isinstance(change, TensorStage)
    assert gradient.tensor.tolist() == ["b", "a"], "of the backward pass"
    assert np.array_equal(gradient.digest, [one + two, two])
    assert change.is_update and change.tensor.tolist() == ["b"]
