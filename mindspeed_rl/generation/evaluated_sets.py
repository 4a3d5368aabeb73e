"""Tells how the held-out sets of a run came out, before it and after it."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_rl.generation.evaluate import Evaluation

ONLY = "heldout"  # name of the set of --eval-prompt-data


def by_set(
    first: Mapping[str, Evaluation], last: Mapping[str, Evaluation]
) -> dict[str, dict[str, float | None]]:
    """Return reward, accuracies and sampled shares of every set, before and after a run.

    Args:
        first: Evaluations before the run by the name of the set; empty for a run that resumed.
        last: Evaluations after it.
    """
    found: dict[str, dict[str, float | None]] = {}
    for name, after in last.items():
        before = _numbers(first[name]) if name in first else {}
        numbers = found[name or ONLY] = {"prompts": float(after.num_prompts)}
        for key, value in _numbers(after).items():
            numbers |= {f"{key}_before": before.get(key), f"{key}_after": value}
    return found


def result_lines(sets: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """Return a line for each set: mean reward, then the share of right answers."""
    lines = []
    for name, numbers in sets.items():
        reward = _change(numbers, "reward", "{:.4g}")
        exact = _change(numbers, "accuracy", "{:.1%}")
        lenient = _change(numbers, "accuracy_lenient", "{:.1%}")
        lines.append(
            f"held-out{'' if name == ONLY else f' {name}'}: reward {reward}, accuracy {exact}, "
            f"lenient {lenient}"
        )
    return lines


def _numbers(result: Evaluation) -> dict[str, float]:
    own = {
        "reward": result.reward,
        "accuracy": result.accuracy,
        "accuracy_lenient": result.accuracy_lenient,
    }
    return own | dict(result.sampled)


def _change(numbers: Mapping[str, float | None], key: str, form: str) -> str:
    before, after = numbers[f"{key}_before"], numbers[f"{key}_after"]
    return (f"{form.format(before)} -> " if before is not None else "") + form.format(after)
