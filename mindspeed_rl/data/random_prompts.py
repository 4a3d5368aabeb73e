"""Prompts of random tokens and of one length, for throughput runs."""

from __future__ import annotations

import hashlib

from mindspeed_rl.data.prompts import PromptDataset, rows_table


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> PromptDataset:
    """Return a data set of ``count`` prompts of ``length`` tokens, equal on every rank.

    The tokens are drawn evenly from the whole vocabulary, special ones included.
    """
    import numpy as np

    tokens = np.random.default_rng(seed).integers(0, vocab_size, (count, length), dtype=np.int32)
    return PromptDataset(
        source=f"{count} prompts of {length} random tokens",
        fingerprint=hashlib.sha256(tokens.tobytes()).hexdigest(),
        max_prompt_length=length,
        num_filtered_long=0,
        metadata_keys=frozenset(),
        table=rows_table(tokens.tolist()),
        pages=(),
    )
