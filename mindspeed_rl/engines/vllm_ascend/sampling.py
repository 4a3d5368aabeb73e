"""Corrects vLLM-Ascend's sampler: its log-probs, and the random numbers of requests.

It builds its sampler without the argument ``logprobs_mode`` of ``vllm.LLM``. Its sampler then
reports log-probs from before the temperature and the truncation.

It takes back 4 of a generator's offset after a step that read only a part of a prompt, whose token
is discarded. A draw moves the offset of an NPU's generator by 12, so tokens would depend on how
prompts are cut. Here no generator draws, and the draws of all requests of a step are one
(:mod:`~mindspeed_rl.vllm_patches.seeded_draws`).
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_rl.core.patching import Patch, apply_patch
from mindspeed_rl.vllm_patches.seeded_draws import check_noise, drawn_at_once, given_draws

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


def draw_in_batches(device: torch.device) -> None:
    """Patch runner and sampler to draw the tokens of a step at once. Idempotent.

    Raises:
        RuntimeError: The device computes other noise than the CPU.
    """
    check_noise(device)
    apply_patch(_RUNNER)
    apply_patch(_SAMPLER)


_RUNNER = Patch(
    target="vllm_ascend.worker.model_runner_v1:NPUModelRunner._sample",
    parameters=("self", "logits", "spec_decode_metadata"),
    make=given_draws,
    why="about seven kernels per request and step, tokens that depend on how prompts are cut, and "
    "noise that a request takes again when it moves",
    upstream="vllm_ascend/worker/model_runner_v1.py, _bookkeeping_sync: get_offset() - 4",
    versions="vllm-ascend 0.23.0, 0.23.0.post1",
    remove_when="vLLM-Ascend draws the noise of a batch from seeds and positions at once",
)
_SAMPLER = Patch(
    target="vllm_ascend.sample.sampler:random_sample",
    parameters=("probs", "generators"),
    make=drawn_at_once,
    why=_RUNNER.why,
    upstream="vllm_ascend/sample/sampler.py, random_sample",
    versions=_RUNNER.versions,
    remove_when=_RUNNER.remove_when,
)
