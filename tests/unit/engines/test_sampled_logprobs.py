"""Log-probs of sampled tokens: how they are gathered, and that they belong to the tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl.rollout.open_requests import sampled_logprobs
from mindspeed_rl.vllm_patches.sampled_logprobs import without_ranks


def test_only_the_sampled_token_is_gathered() -> None:
    """vLLM's own method where alternatives are asked for, which then have ranks."""
    logprobs, tokens = torch.randn(3, 7).log_softmax(-1), torch.tensor([6, 0, 2])
    asked = []
    gather = without_ranks(lambda *args: asked.append(args[1:]))
    found = gather(logprobs, 0, tokens)
    assert found.logprob_token_ids.tolist() == [[6], [0], [2]]
    assert found.logprobs.tolist() == [[float(logprobs[i, t])] for i, t in enumerate(tokens)]
    assert found.selected_token_ranks.shape == (3,) and not asked
    gather(logprobs, 2, tokens)
    assert asked == [(2, tokens)]


@pytest.mark.parametrize("tokens", [[5, 9], [5, 9, 8, 1], [5, 8, 9]])
def test_logprobs_of_other_tokens_are_refused(tokens: list[int]) -> None:
    flat = SimpleNamespace(token_ids=tokens, logprobs=[-0.5] * len(tokens))
    with pytest.raises(RuntimeError, match="other tokens"):
        sampled_logprobs(SimpleNamespace(token_ids=(5, 9, 8), logprobs=flat))
    flat = SimpleNamespace(token_ids=[5, 9, 8], logprobs=[-0.5, -2.0, -1.0])
    found = sampled_logprobs(SimpleNamespace(token_ids=(5, 9, 8), logprobs=flat))
    assert found == (-0.5, -2.0, -1.0)
