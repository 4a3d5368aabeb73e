"""Makes vLLM-Ascend report the log-probs of the distribution from which it samples.

It builds its sampler without the argument ``logprobs_mode`` of ``vllm.LLM``. Its sampler then
reports log-probs from before the temperature and the truncation.
"""

from __future__ import annotations

from typing import Any

MODE = "processed_logprobs"


def report_processed_logprobs(runner: Any) -> None:
    """Set the mode of a built runner's sampler, which reads it at every call.

    Raises:
        RuntimeError: The sampler has no such mode, so that all log-probs would be wrong.
    """
    sampler = runner.sampler
    for part in (sampler, sampler.topk_topp_sampler):
        if not hasattr(part, "logprobs_mode"):
            raise RuntimeError(
                f"vLLM-Ascend's {type(part).__name__} has no logprobs_mode: its log-probs would be "
                "those of another distribution than it samples from"
            )
        part.logprobs_mode = MODE
