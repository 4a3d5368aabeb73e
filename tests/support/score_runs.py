"""Runs the score command on the models of ``support.score_cases``, beside transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from support.family_models import write_family_model
from support.score_cases import VARIANTS, ScoreLayout
from support.spawn import run_command
from support.whole_runs import run_entry

ENTRY = "mindspeed_rl.score"
TOLERANCE = 2e-4  # nats
LIMIT_S = 300.0  # on a busy machine
LENGTHS = (41, 1, 12, 2, 27, 33, 48)  # one token has nothing to score
_NUM_IDS = 64  # known to every variant
_COMMON = (
    *("--platform", "cpu", "--make-vocab-size-divisible-by", "8", "--micro-batch-size", "2"),
    *("--rollout-kv-cache-gb", "0.0625", "--tokens", "in.npz"),
)
# folder, flags, number of ranks -> what was printed
Launcher = Callable[[Path, Sequence[str], int], str]


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest absolute differences over all tokens, in nats."""

    logp: float
    entropy: float

    @property
    def largest(self) -> float:
        """Of both; no number if one is none."""
        return float(np.max([self.logp, self.entropy]))


def warm(folder: Path, flags: Sequence[str], num_ranks: int) -> str:
    """Ranks that need not import the libraries."""
    return run_command(ENTRY, flags, num_ranks, cwd=folder, timeout_s=LIMIT_S)


def torchrun(folder: Path, flags: Sequence[str], num_ranks: int) -> str:
    """As a user starts it."""
    ended = run_entry(folder, flags, entry="score", num_ranks=num_ranks, limit_s=LIMIT_S)
    assert ended.returncodes == (0,), ended.output
    return ended.output


def transformers_scores(
    model_dir: Path, sequences: Path, temperature: float = 1.0
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """log-probs and entropies [N, T] of transformers in fp32, each sequence alone and unpadded."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    found = np.load(sequences)
    logp, entropy = (np.zeros(found["tokens"].shape, np.float32) for _ in range(2))
    for i, length in enumerate(found["length"]):
        ids = torch.tensor(found["tokens"][i, :length])
        with torch.no_grad():
            rows = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        logp[i, 1:length] = rows.gather(-1, ids[1:, None])[:, 0]
        entropy[i, 1:length] = -(rows.exp() * rows).sum(-1)
    return logp, entropy


class ScoreWorld:
    """A folder with the models, the sequences (``in.npz``) and the results.

    Args:
        folder: to work in.
        launcher: of the command.
    """

    def __init__(self, folder: Path, launcher: Launcher = warm) -> None:
        self.folder, self._launcher = folder, launcher
        shape = (len(LENGTHS), max(LENGTHS))
        tokens = np.random.default_rng(0).integers(0, _NUM_IDS, shape)
        np.savez(folder / "in.npz", tokens=tokens, length=np.array(LENGTHS))
        self.expected = cache(self._expected)

    def _expected(self, variant: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """log-probs and entropies of transformers; the model is written first."""
        model = write_family_model(VARIANTS[variant], self.folder / variant)
        return transformers_scores(model, self.folder / "in.npz")

    def output(self, variant: str, backend: str, layout: ScoreLayout) -> str:
        """Name of the result in the folder."""
        return f"{variant}.{backend}.{layout.name.replace(' ', '-')}.npz"

    def difference(self, variant: str, backend: str, layout: ScoreLayout) -> Difference:
        """Run the command once.

        Raises:
            AssertionError: it failed, with its output, or its result is not of these sequences.
        """
        logp, entropy = self.expected(variant)  # writes the model
        output = self.output(variant, backend, layout)
        own = ("--hf-checkpoint", variant, "--output", output, "--backend", backend)
        told = self._launcher(self.folder, [*own, *_COMMON, *layout.flags], layout.num_ranks)
        assert f"{len(LENGTHS)} sequences, {sum(LENGTHS)} tokens: " in told, told
        found = np.load(self.folder / output)
        assert found["length"].tolist() == list(LENGTHS)
        assert found["logp"].dtype == found["entropy"].dtype == np.float32
        unscored = np.arange(max(LENGTHS))[None] >= np.array(LENGTHS)[:, None]
        unscored[:, 0] = True
        assert not found["logp"][unscored].any() and not found["entropy"][unscored].any()
        return Difference(
            float(np.abs(found["logp"] - logp).max()),
            float(np.abs(found["entropy"] - entropy).max()),
        )
