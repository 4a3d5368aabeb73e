"""Log-probs of the last stage: what ``trainer/logprobs.py`` and the loss hold."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.memory.tape import Step

_FP32, _INT64 = 4, 8


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Sizes of the output projection of one micro-batch on one rank.

    Attributes:
        trained: tokens with a loss.
        hidden: hidden size.
        vocab: vocabulary rows of this rank, padding included.
        chunk: ``--logprob-chunk-tokens``.
        item: bytes of an element of the hidden states and the weight.
        entropy_gradient: whether the loss has an entropy term.
        hidden_states: bytes of the last norm's output, gathered over tensor-parallel ranks.
    """

    trained: int
    hidden: int
    vocab: int
    chunk: int
    item: int
    entropy_gradient: bool
    hidden_states: int


def head_step(s: HeadSizes) -> Step:
    """Log-probs in chunks: three matrices of logits forward; see ``_SelectedLogProbs``."""
    rows = min(s.chunk, s.trained)
    several = s.trained > s.chunk
    logits = rows * s.vocab * _FP32
    narrow = rows * s.vocab * s.item if s.item != _FP32 else 0  # the product before its upcast
    selected = s.trained * s.hidden * s.item
    # targets, owned, log-partition, entropy, log-probs, and the loss on them
    per_token = s.trained * (2 * _INT64 + 1 + 9 * _FP32)
    forward = 3 * logits + (narrow if several else 0) + s.hidden_states
    weight = s.vocab * s.hidden
    sums = weight * _FP32 + selected  # gradients of the weight and of the hidden states
    if s.entropy_gradient:
        chunk = 5 * logits
    else:
        chunk = 2 * logits + 2 * narrow if several else logits + narrow
    step = max(chunk, logits + narrow + weight * s.item)  # the weight's share of one chunk
    backward = sums + max(step, weight * s.item)
    return Step("log-probs", selected + per_token, forward, backward)


def value_step(trained: int, hidden: int, item: int, gathered: int) -> Step:
    """Values: see ``ValueOutputHead``.

    Args:
        trained: tokens with a loss.
        hidden: hidden size.
        item: bytes of an element of the hidden states.
        gathered: bytes of the hidden states of all tensor-parallel ranks.
    """
    rows = trained * hidden * _FP32
    narrow = trained * hidden * item if item != _FP32 else 0  # the rows before their upcast
    # values, old values, returns, clipped values, and the loss on them
    per_token = trained * 9 * _FP32
    return Step("values", rows + per_token, gathered + narrow, rows + narrow + gathered)
