"""Policy losses once more: numpy, fp64, one sequence after the other, straight from the sources.

Nothing of the product but the settings is used. ``log p`` is passed twice: the loss differentiates
the first and holds the second fixed wherever the source stops the gradient, so that central
differences over the first give the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindspeed_rl.algorithms.policy_losses import SurrogateSettings

Row = NDArray[np.float64]
LIMIT = 20.0  # nats, of every log-ratio that is exponentiated


@dataclass(frozen=True, slots=True)
class Sequence1:
    """One sequence, [tokens] each."""

    now: Row
    old: Row
    advantage: Row
    selected: NDArray[np.bool_]


def ratio(now: Row, old: Row) -> Row:
    return np.exp(np.clip(now - old, -LIMIT, LIMIT))


def _clip_loss(r: Row, a: Row, k: SurrogateSettings) -> Row:
    return np.maximum(-r * a, -np.clip(r, 1 - k.eps_lower, 1 + k.eps_upper) * a)


def ppo(now: Row, fixed: Row, s: Sequence1, k: SurrogateSettings) -> Row:
    loss = _clip_loss(ratio(now, s.old), s.advantage, k)
    if k.clip_ratio_c:
        loss = np.where(s.advantage < 0, np.minimum(loss, -k.clip_ratio_c * s.advantage), loss)
    return loss


def gspo(now: Row, fixed: Row, s: Sequence1, k: SurrogateSettings) -> Row:
    """The sequence's own objective; its gradient is exact, not that of the per-token form."""
    if not now.size:
        return now
    whole = np.exp(np.clip(np.mean(now - s.old), -LIMIT, LIMIT))
    return np.full_like(now, _clip_loss(whole, s.advantage[0], k))


def geo_mean(now: Row, fixed: Row, s: Sequence1, k: SurrogateSettings) -> Row:
    if not now.size:
        return now
    d, a = now - s.old, s.advantage[0]
    kept = np.minimum(d, k.eps_upper) if a > 0 else np.maximum(d, -k.eps_lower)
    return np.full_like(now, -a * np.exp(np.clip(np.mean(kept), -LIMIT, LIMIT)))


def cispo(now: Row, fixed: Row, s: Sequence1, k: SurrogateSettings) -> Row:
    return -np.clip(ratio(fixed, s.old), 1 - k.eps_lower, 1 + k.eps_upper) * s.advantage * now


def gpg(now: Row, fixed: Row, s: Sequence1, k: SurrogateSettings) -> Row:
    return -s.advantage * now


def sapo(now: Row, fixed: Row, s: Sequence1, k: SurrogateSettings) -> Row:
    tau = np.where(s.advantage > 0, k.sapo_tau_pos, k.sapo_tau_neg)
    with np.errstate(over="ignore"):  # e^-x of a very small gate
        return -s.advantage * 4 / tau / (1 + np.exp(-tau * (ratio(now, s.old) - 1)))


def dppo_tv(now: Row, fixed: Row, s: Sequence1, k: SurrogateSettings) -> Row:
    change = np.exp(fixed) - np.exp(s.old)
    fine = np.where(s.advantage > 0, change <= k.eps_upper, change >= -k.eps_lower)
    return -np.minimum(ratio(fixed, s.old), k.ratio_cap) * s.advantage * now * fine


def dppo_kl(now: Row, fixed: Row, s: Sequence1, k: SurrogateSettings) -> Row:
    p, q = np.exp(fixed), np.exp(s.old)
    kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    up = (kl <= k.eps_upper) | (p <= q)
    down = (kl <= k.eps_lower) | (p >= q)
    fine = np.where(s.advantage > 0, up, down)
    return -np.minimum(ratio(fixed, s.old), k.ratio_cap) * s.advantage * now * fine


def dro(now: Row, fixed: Row, s: Sequence1, k: SurrogateSettings) -> Row:
    return -(s.advantage * now - k.dro_beta / 2 * (now - s.old) ** 2)


def clip_cov(now: Row, fixed: Row, s: Sequence1, k: SurrogateSettings) -> Row:
    return np.where(s.selected, 0.0, ppo(now, fixed, s, k))


def kl_cov(now: Row, fixed: Row, s: Sequence1, k: SurrogateSettings) -> Row:
    d = np.clip(now - s.old, -LIMIT, LIMIT)
    return -np.exp(d) * s.advantage + k.kl_cov_coef * np.abs(d) * s.selected


LOSSES: dict[str, Callable[[Row, Row, Sequence1, SurrogateSettings], Row]] = {
    f.__name__: f
    for f in (ppo, gspo, geo_mean, cispo, gpg, sapo, dppo_tv, dppo_kl, dro, clip_cov, kl_cov)
}


def aggregate(rows: Sequence[Row], mode: str, longest: int) -> float:
    """The loss of a step from those of its tokens."""
    rows = [r for r in rows if r.size]
    if not rows:
        return 0.0
    tokens = np.concatenate(rows)
    sums = np.array([r.sum() for r in rows])
    return float(
        {
            "token-mean": tokens.mean(),
            "token-sum": tokens.sum(),
            "seq-mean-token-sum": sums.mean(),
            "seq-mean-token-sum-norm": sums.mean() / longest,
            "seq-mean-token-mean": np.mean([r.mean() for r in rows]),
        }[mode]
    )


def loss_and_gradient(
    name: str, step: Sequence[Sequence1], k: SurrogateSettings, mode: str, longest: int
) -> tuple[float, list[Row]]:
    """Value, and gradient with respect to every log p by central differences."""
    fixed = [s.now for s in step]

    def value(rows: Sequence[Row]) -> float:
        losses = [LOSSES[name](n, f, s, k) for n, f, s in zip(rows, fixed, step, strict=True)]
        return aggregate(losses, mode, longest)

    gradients = [np.zeros_like(row) for row in fixed]
    width = 1e-6
    for i, row in enumerate(fixed):
        for t in range(row.size):
            ends = []
            for sign in (1, -1):
                moved = row.copy()
                moved[t] += sign * width
                ends.append(value([*fixed[:i], moved, *fixed[i + 1 :]]))
            gradients[i][t] = (ends[0] - ends[1]) / (2 * width)
    return value(fixed), gradients
