"""What a run says of its held-out sets at its end."""

from mindspeed_rl.generation.evaluate import Evaluation
from mindspeed_rl.generation.evaluated_sets import by_set, result_lines

BEFORE = {
    "": Evaluation(0.1, 0.2, 30, reward=0.0039, sampled={"pass@4": 0.4}),
    "aime": Evaluation(0.0, 0.05, 60, reward=0.25),
}
AFTER = {
    "": Evaluation(0.6, 0.7, 30, reward=0.0352, sampled={"pass@4": 0.8}),
    "aime": Evaluation(0.0, 0.15, 60, reward=0.5),
}


def test_every_set_has_its_numbers_before_and_after() -> None:
    sets = by_set(BEFORE, AFTER)
    assert sets["heldout"] == {
        "prompts": 30.0,
        "reward_before": 0.0039, "reward_after": 0.0352,
        "accuracy_before": 0.1, "accuracy_after": 0.6,
        "accuracy_lenient_before": 0.2, "accuracy_lenient_after": 0.7,
        "pass@4_before": 0.4, "pass@4_after": 0.8,
    }  # fmt: skip
    assert list(sets) == ["heldout", "aime"] and sets["aime"]["prompts"] == 60.0
    assert result_lines(sets) == [
        "held-out: reward 0.0039 -> 0.0352, accuracy 10.0% -> 60.0%, lenient 20.0% -> 70.0%",
        "held-out aime: reward 0.25 -> 0.5, accuracy 0.0% -> 0.0%, lenient 5.0% -> 15.0%",
    ]


def test_a_run_that_resumed_has_no_numbers_from_before() -> None:
    sets = by_set({}, {"": AFTER[""]})
    assert sets["heldout"]["reward_before"] is None and sets["heldout"]["reward_after"] == 0.0352
    assert result_lines(sets) == ["held-out: reward 0.0352, accuracy 60.0%, lenient 70.0%"]
    assert by_set(BEFORE, {}) == {} and result_lines({}) == []
