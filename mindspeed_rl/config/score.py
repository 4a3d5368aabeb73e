"""Flags of the scoring entry."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.core.flag import flag


@dataclass(frozen=True, slots=True)
class ScoreConfig:
    """Scoring.

    Log-probs and entropies of given sequences, by the trainer in any layout or by the engine; or a
    table of the differences of two such files. ``--tokens`` holds ``tokens`` int [N, T], padded on
    the right, and ``length`` int [N]; ``--output`` gets ``logp`` fp32 [N, T], the log-prob of each
    token given those before it (0 for the first and in padding), ``entropy`` fp32 [N, T] of the
    distribution that it was taken from, in nats, and ``length``.
    """

    tokens: str = flag("", "File of sequences (.npz). Required without --compare.")
    output: str = flag(
        "",
        "File for the result (.npz), in a folder that every node can write to. Required without "
        "--compare.",
    )
    backend: str = flag(
        "megatron",
        "Who computes: the trainer, in the layout of the training flags, or vLLM, in that of "
        "--rollout-*.",
        choices=("megatron", "engine"),
    )
    temperature: float = flag(1.0, "Logits are divided by it.", above=0.0)
    no_entropy: bool = flag(
        False, "Leave entropy out (0): the engine has to hand out its whole distribution for it."
    )
    compare: tuple[str, ...] = flag(
        (), "Print how two results differ, and end: --compare A.npz B.npz.", nargs="*"
    )
