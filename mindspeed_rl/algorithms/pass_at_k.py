"""pass@k: the probability that at least one of k samples of a prompt is right."""

from __future__ import annotations

import math


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return an unbiased estimate of pass@k from ``num_samples`` samples of one prompt.

    1 - C(n - c, k) / C(n, k): the fraction of all subsets of k samples that hold a right one (Chen
    et al., Evaluating Large Language Models Trained on Code, arXiv:2107.03374, equation 1).

    Args:
        num_samples: n, at least k.
        num_right: c, how many of the samples are right.
        k: At least 1.
    """
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples, (num_samples, num_right, k)
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def reported_k(num_samples: int) -> list[int]:
    """Return the k that are reported: powers of 2 up to ``num_samples``, and ``num_samples``."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i <= num_samples]
    return sorted({*powers, num_samples})
