"""Files of sequences: what is refused, and how."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mindspeed_rl.data.scores import Scores, read_scores, read_sequences


def save(path: Path, tokens: object, length: object) -> None:
    np.savez(path, tokens=np.array(tokens), length=np.array(length))


def cut_off(path: Path) -> None:
    save(path, np.ones((4, 100), np.int64), [1, 2, 3, 4])
    path.write_bytes(path.read_bytes()[:-40])


def cut_off_array(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("tokens", "length"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00")


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda path: save(path, [[1, 99]], [2]), r"ids from 1 to 99; allowed: 0 to 98$"),
        (lambda path: save(path, [[1, -2]], [2]), r"ids from -2 to 1; allowed: 0 to 98$"),
        (lambda path: save(path, [[1, 2], [3, 4]], [2, 0]), r"lengths from 0 to 2; allowed: 1 to"),
        (lambda path: save(path, [[1, 2]], [3]), r"lengths from 3 to 3; allowed: 1 to 2 "),
        (lambda path: save(path, [[1] * 9], [9]), r"lengths from 9 to 9; allowed: 1 to 8 "),
        (lambda path: save(path, [[1.0, 2.0]], [2]), r"tokens float64\[1, 2\], .*; needed: int"),
        (lambda path: save(path, [1, 2], [2]), r"tokens int64\[2\], length int64\[1\]; needed"),
        (lambda path: save(path, np.ones((0, 2), int), np.ones(0, int)), r"N at least 1$"),
        (lambda path: np.savez(path, tokens=np.ones((1, 1), int)), r"lacks \['length'\]; it has"),
        (lambda path: path.write_text("tokens"), r"no readable \.npz file: File is not a zip"),
        (lambda path: np.save(path.open("wb"), np.ones(3)), r"no readable \.npz file"),
        (lambda path: save(path, [[None]], [1]), r"no readable \.npz file: Object arrays"),
        (cut_off, r"no readable \.npz file"),
        (cut_off_array, r"no readable \.npz file"),
        (lambda path: None, r"no such file$"),
    ],
)
def test_bad_sequences_are_refused(
    tmp_path: Path, write: Callable[[Path], None], told: str
) -> None:
    path = tmp_path / "in.npz"
    write(path)
    with pytest.raises(ValueError, match=rf"^--tokens .*in\.npz: .*{told}"):
        read_sequences(str(path), vocab_size=99, limit=8)


def test_ids_in_the_padding_do_not_matter(tmp_path: Path) -> None:
    save(tmp_path / "in.npz", [[5, -1, 99], [1, 2, 98]], [1, 3])
    found = read_sequences(str(tmp_path / "in.npz"), vocab_size=99, limit=8)
    assert [found.ids(i) for i in range(2)] == [[5], [1, 2, 98]]


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    logp, entropy = (np.random.default_rng(i).random((2, 3), np.float32) for i in (0, 1))
    Scores(logp, entropy, np.array([3, 2])).save(tmp_path / "new" / "out.npz")
    found = read_scores(str(tmp_path / "new" / "out.npz"))
    assert np.array_equal(found.logp, logp)
    assert np.array_equal(found.entropy, entropy)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out.npz"], "no leftovers"
