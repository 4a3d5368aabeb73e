"""Files of sequences and of their log-probs, and the comparison of two such files.

Shapes: N sequences, T tokens of the longest.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import atomic_path


@dataclass(frozen=True)
class ScoreInputs:
    """Token ids to score: ``tokens`` int64 [N, T], padded on the right; ``length`` int64 [N]."""

    tokens: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]

    def ids(self, index: int) -> list[int]:
        """Return the token ids of one sequence."""
        return self.tokens[index, : self.length[index]].tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Scores:
    """``logp`` and ``entropy`` fp32 [N, T], in nats; 0 at first tokens and in padding."""

    logp: npt.NDArray[np.float32]
    entropy: npt.NDArray[np.float32]
    length: npt.NDArray[np.int64]

    def save(self, path: str | Path) -> None:
        """Write the ``.npz`` file; a reader sees either the old file or the whole new one."""
        with atomic_path(path) as partial, partial.open("wb") as file:
            np.savez(file, logp=self.logp, entropy=self.entropy, length=self.length)


def _load(flag: str, path: str, names: tuple[str, ...]) -> dict[str, Any]:
    if not Path(path).is_file():
        raise UsageError(f"{flag} {path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            present = sorted(file.removesuffix(".npy") for file in archive.namelist())
        missing = sorted(set(names) - set(present))
        if not missing:
            with np.load(path) as arrays:
                return {name: arrays[name] for name in names}
    except (OSError, zipfile.BadZipFile, EOFError, ValueError) as error:
        # numpy raises ValueError for arrays that are cut off or hold objects.
        raise UsageError(f"{flag} {path}: no readable .npz file: {error}") from error
    raise UsageError(f"{flag} {path}: lacks {missing}; it has {present}")


def read_sequences(path: str, vocab_size: int, limit: int) -> ScoreInputs:
    """Read and check a file of sequences.

    Raises:
        UsageError: no such file, wrong arrays, ids outside the vocabulary, lengths outside
            [1, T], or sequences longer than ``limit``.
    """
    found = _load("--tokens", path, ("tokens", "length"))
    tokens, length = found["tokens"], found["length"]
    integers = all(np.issubdtype(a.dtype, np.integer) for a in (tokens, length))
    if not integers or tokens.ndim != 2 or length.shape != tokens.shape[:1] or not length.size:
        raise UsageError(
            f"--tokens {path}: tokens {tokens.dtype}{list(tokens.shape)}, length "
            f"{length.dtype}{list(length.shape)}; needed: integers [N, T] and [N], N at least 1"
        )
    if length.min() < 1 or length.max() > min(tokens.shape[1], limit):
        raise UsageError(
            f"--tokens {path}: lengths from {length.min()} to {length.max()}; allowed: 1 to "
            f"{min(tokens.shape[1], limit)} (T is {tokens.shape[1]}; the model's "
            f"positions allow {limit} with this --backend)"
        )
    used = np.arange(tokens.shape[1])[None] < length[:, None]
    if tokens[used].min() < 0 or tokens[used].max() >= vocab_size:
        raise UsageError(
            f"--tokens {path}: ids from {tokens[used].min()} to {tokens[used].max()}; allowed: 0 "
            f"to {vocab_size - 1}"
        )
    return ScoreInputs(tokens.astype(np.int64), length.astype(np.int64))


def read_scores(path: str) -> Scores:
    """Read a file of scores.

    Raises:
        UsageError: no such file or wrong arrays.
    """
    return Scores(**_load("--compare", path, ("logp", "entropy", "length")))


def compare(a: Scores, b: Scores) -> str:
    """Return a table of the differences between two results for the same sequences.

    Raises:
        UsageError: the results are of different sequences.
    """
    if a.logp.shape != b.logp.shape or not np.array_equal(a.length, b.length):
        raise UsageError(
            f"--compare: the files are of different sequences: {list(a.logp.shape)} and "
            f"{list(b.logp.shape)}, or other lengths"
        )
    position = np.arange(a.logp.shape[1])[None]
    scored = (position >= 1) & (position < a.length[:, None])
    lines = [f"{int(scored.sum())} tokens of {len(a.length)} sequences"]
    lines.append(f"{'':10}{'max |a-b|':>12}{'mean |a-b|':>12}{'mean a-b':>12}  worst at")
    for name in ("logp", "entropy"):
        x, y = getattr(a, name).astype(np.float64), getattr(b, name).astype(np.float64)
        difference = np.where(scored, x - y, 0.0)
        count = max(1, int(scored.sum()))
        gap = np.abs(difference)
        row, column = np.unravel_index(int(np.argmax(gap)), gap.shape)
        lines.append(
            f"{name:10}{gap.max():12.3e}{gap.sum() / count:12.3e}{difference.sum() / count:12.3e}"
            f"  sequence {row} token {column}"
        )
    ratio = np.exp(np.where(scored, a.logp.astype(np.float64) - b.logp, 0.0))[scored]
    if ratio.size:
        lines.append(f"probability ratio a/b: {ratio.min():.6f} to {ratio.max():.6f}")
    return "\n".join(lines)
