"""The score command without processes: the ranks' shares as one result, the comparison."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mindspeed_rl import score
from mindspeed_rl.data.scores import ScoreInputs, Scores, compare, read_scores

LENGTHS = [3, 1, 2]
# rank, sequence, position, log-prob, entropy: all that is to be scored
SHARES = [[(0, 1, -1.0, 0.5), (2, 1, -3.0, 0.25)], [(0, 2, -2.0, 0.75)]]


def scores(shift: float = 0.0, lengths: list[int] | None = None) -> Scores:
    """Of three sequences of up to four tokens."""
    logp, entropy = (np.zeros((3, 4), np.float32) for _ in range(2))
    for sequence, position, value, uncertainty in SHARES[0] + SHARES[1]:
        logp[sequence, position] = value + shift * (sequence == 2)
        entropy[sequence, position] = uncertainty
    return Scores(logp, entropy, np.array(lengths or LENGTHS))


def gathered(
    shares: list[list[score.TokenScore]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    rank: int = 0,
    no_entropy: bool = False,
) -> Scores | None:
    """What a rank gets; the others' shares come from ``shares``."""

    def gather_object(mine: object, everything: list[object] | None) -> None:
        assert mine == shares[rank]
        assert (everything is None) == (rank != 0)
        if everything is not None:
            everything[:] = shares

    monkeypatch.setattr("torch.distributed.gather_object", gather_object)
    job = SimpleNamespace(
        world=SimpleNamespace(rank=rank, size=len(shares)),
        config=SimpleNamespace(score=SimpleNamespace(no_entropy=no_entropy)),
    )
    sequences = ScoreInputs(np.ones((3, 4), np.int64), np.array(LENGTHS))
    return score.gather(cast(Any, job), sequences, shares[rank])


def test_shares_of_all_ranks_become_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """[N, T] fp32 of the input's shape; first tokens and the padding stay 0."""
    found, wanted = gathered(SHARES, monkeypatch), scores()
    assert found is not None
    for name in ("logp", "entropy", "length"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
    assert found.logp.dtype == found.entropy.dtype == np.float32
    assert found.logp.shape == found.entropy.shape == (3, 4)
    assert gathered(SHARES, monkeypatch, rank=1) is None, "one rank writes"


def test_entropy_that_is_left_out_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gathered(SHARES, monkeypatch, no_entropy=True)
    assert found is not None and not found.entropy.any()
    assert np.array_equal(found.logp, scores().logp)


@pytest.mark.parametrize(
    "shares",
    [
        [SHARES[0], []],
        [SHARES[0], [*SHARES[1], (0, 1, -1.0, 0.5)]],
        [SHARES[0], [(1, 1, -2.0, 0.75)]],
        [SHARES[0], [(0, 0, -2.0, 0.75)]],
    ],
    ids=["never", "twice", "padding", "first token"],
)
def test_every_token_is_scored_once(
    shares: list[list[score.TokenScore]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=r"^[12] tokens"):
        gathered(shares, monkeypatch)


def test_a_comparison_says_how_far_and_where() -> None:
    lines = compare(scores(), scores(shift=0.5)).splitlines()
    logp, entropy = (next(x for x in lines if x.startswith(name)) for name in ("logp", "entropy"))
    differences = [0.5, 0.1667, -0.1667]  # largest, mean of the absolute ones, mean
    assert [float(x) for x in logp.split()[1:4]] == pytest.approx(differences, abs=1e-4)
    assert re.findall(r"\b\d+\b", logp)[-2:] == ["2", "1"], "sequence and token of the largest"
    assert [float(x) for x in entropy.split()[1:4]] == [0.0, 0.0, 0.0]
    assert "0.606531 to 1.000000" in lines[-1]


def test_what_is_not_scored_is_not_compared() -> None:
    """Files of other programs may hold anything there."""
    other = scores()
    other.logp[:, 0] = 7.0
    other.entropy[1, 1:] = np.nan
    largest = dict(line.split()[:2] for line in compare(scores(), other).splitlines())
    assert float(largest["logp"]) == float(largest["entropy"]) == 0.0


def test_the_files_of_two_runs_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in ("a.npz", "b.npz")]
    scores().save(files[0])
    scores(shift=0.5).save(files[1])
    assert score.compare_files(["--compare", *files]) == 0
    assert capsys.readouterr().out.rstrip() == compare(scores(), scores(shift=0.5)).rstrip()
    assert read_scores(files[0]).length.tolist() == LENGTHS


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["a"], "--compare"),
        (["a", "a", "a"], "--compare"),
        (["a", "shorter"], "[3, 4]"),
        (["a", "fewer"], "[2, 4]"),
        (["a", "none"], "none.npz"),
        (["input", "a"], "input.npz"),
    ],
)
def test_files_that_cannot_be_compared(
    names: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = scores()
    whole.save(tmp_path / "a.npz")
    scores(lengths=[3, 1, 1]).save(tmp_path / "shorter.npz")
    Scores(whole.logp[:2], whole.entropy[:2], whole.length[:2]).save(tmp_path / "fewer.npz")
    np.savez(tmp_path / "input.npz", tokens=np.ones((3, 4), int), length=np.array(LENGTHS))
    assert score.compare_files(["--compare", *(str(tmp_path / f"{n}.npz") for n in names)]) == 2
    error = capsys.readouterr().err
    assert "--compare" in error and named in error
    assert error.count("\n") == 1, "one line"
