"""Corrects vLLM-Ascend's sampler: its log-probs, and the random numbers of requests.

It builds its sampler without the argument ``logprobs_mode`` of ``vllm.LLM``. Its sampler then
reports log-probs from before the temperature and the truncation.

It takes back 4 of a generator's offset after a step that read only a part of a prompt, whose token
is discarded. A draw moves the offset of an NPU's generator by 12, so tokens would depend on how
prompts are cut. Here a draw moves it by what is taken back, and the draws of all requests of a step
are one (:mod:`~mindspeed_rl.algorithms.sampling_noise`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed_rl.algorithms.sampling_noise import draw_keys, exponential_noise
from mindspeed_rl.core.patching import Patch, apply_patch

MODE = "processed_logprobs"
# NPUModelRunner._bookkeeping_sync takes this back. Offsets of a device are multiples of 4.
_OFFSET_OF_A_DRAW = 4


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
    """Patch the sampler to draw the noise of all requests of a step at once. Idempotent.

    Raises:
        RuntimeError: The device computes other noise than the CPU.
    """
    keys = draw_keys(range(1, 5), range(4))
    expected, found = (exponential_noise(k, 64).cpu() for k in (keys, keys.to(device)))
    if not torch.allclose(found, expected, rtol=1e-4):
        raise RuntimeError(
            f"noise for sampling on {device} differs from the CPU's by up to "
            f"{float((found - expected).abs().max())}: its products of 32-bit integers do not wrap "
            "around, or its logarithm is inexact"
        )
    apply_patch(_PATCH)


def _drawn_at_once(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def random_sample(probs: torch.Tensor, generators: dict[int, torch.Generator]) -> torch.Tensor:
        count, size = probs.shape
        if not generators:  # a dummy batch
            return original(probs, generators)
        seeds, offsets = [0] * count, [0] * count  # of greedy requests, whose tokens are not used
        for row, generator in generators.items():
            seeds[row], offsets[row] = generator.initial_seed(), generator.get_offset()
            generator.set_offset(offsets[row] + _OFFSET_OF_A_DRAW)
        keys = draw_keys(seeds, offsets)
        keys = keys.pin_memory().to(probs.device, non_blocking=True)
        return probs.div_(exponential_noise(keys, size)).argmax(dim=-1).view(-1)

    return random_sample


_PATCH = Patch(
    target="vllm_ascend.sample.sampler:random_sample",
    parameters=("probs", "generators"),
    make=_drawn_at_once,
    why="about seven kernels per request and step, and tokens that depend on how prompts are cut",
    upstream="vllm_ascend/sample/sampler.py, random_sample; vllm_ascend/worker/model_runner_v1.py, "
    "_bookkeeping_sync: get_offset() - 4",
    versions="vllm-ascend 0.23.0, 0.23.0.post1",
    remove_when="vLLM-Ascend draws the noise of a batch from seeds and positions at once",
)
