"""The size of the block of logits that exists at one time."""

from __future__ import annotations

from dataclasses import dataclass

_FP32 = 4
# Fits into the second and third cache of a core, so that passes over a block cost little beside
# the products that make and use it.
_HOST_BYTES, _HOST_ROWS = 4 << 20, 1024
# Few large kernels; a product adds the weight gradient of up to 8192 tokens to it in one pass.
_DEVICE_BYTES, _DEVICE_ROWS = 1 << 30, 8192


@dataclass(frozen=True, slots=True)
class LogitTile:
    """A block of fp32 logits: so many tokens times so many ids of the vocabulary."""

    rows: int
    columns: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the block."""
        return self.rows * self.columns * _FP32


def logit_tile(chunk: int, tokens: int, vocab_rows: int, *, on_host: bool) -> LogitTile:
    """Return the largest block of logits of a micro-batch. Pure.

    Args:
        chunk: ``--logprob-chunk-tokens``; 0 chooses by memory.
        tokens: Trained tokens of the micro-batch on this rank.
        vocab_rows: Ids of the vocabulary on this rank.
        on_host: Whether a CPU computes.
    """
    if chunk:
        return LogitTile(min(chunk, tokens), vocab_rows)
    size, most = (_HOST_BYTES, _HOST_ROWS) if on_host else (_DEVICE_BYTES, _DEVICE_ROWS)
    rows = min(most, tokens)
    return LogitTile(rows, min(vocab_rows, max(1, size // (_FP32 * max(1, rows)))))
