"""Reward of the quickstart: a user function, found by ``--reward-function FILE.py:FUNCTION``."""

from mindspeed_rl.rewards import RewardRequest


def sorted_digits(request: RewardRequest) -> float:
    """0.8 for the whole answer, ended by itself, plus 0.2 times the share of right positions.

    The end of the response counts as one position.
    """
    answer, response = request.answer, request.response
    ended = request.finish_reason == "stop" and len(response) == len(answer)
    right = sum(a == b for a, b in zip(response, answer, strict=False)) + ended
    return 0.8 * (ended and response == answer) + 0.2 * right / (len(answer) + 1)
