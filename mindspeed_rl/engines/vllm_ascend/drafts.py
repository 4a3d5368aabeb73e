"""Lets vLLM-Ascend ask for our drafts, and verifies them as vLLM's are.

It makes its drafters by ten names of methods, none of which is a class of one's own, and its runner
asks a drafter by its class. Its sampler of drafts is a subclass of vLLM's with a method of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_rl.core.patching import Patch, apply_patch
from mindspeed_rl.rollout.draft_source import HistoryProposer
from mindspeed_rl.vllm_patches.step_sync import import_worker
from mindspeed_rl.vllm_patches.verified_drafts import verified


def apply() -> None:
    """Patch vLLM-Ascend's runner and its sampler of drafts, before it is built. Idempotent."""
    import_worker()
    apply_patch(_DRAFTER)
    apply_patch(_SAMPLER)


def asks_us(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the runner's method that makes its drafter."""

    def get_drafter(self: Any) -> Any:
        from vllm_ascend.spec_decode import AscendNgramProposer

        if self.speculative_config.method != "custom_class":
            return original(self)
        # The runner gives subclasses of this class sampled tokens on the host; the rest is unused.
        drafter = type("AscendHistoryProposer", (HistoryProposer, AscendNgramProposer), {})
        return drafter(self.vllm_config)

    return get_drafter


_VERSIONS = "vllm-ascend 0.23.0, 0.23.0.post1"
_DRAFTER = Patch(
    target="vllm_ascend.worker.model_runner_v1:NPUModelRunner._get_drafter",
    parameters=("self",),
    make=asks_us,
    why="vLLM-Ascend does not know the method custom_class",
    upstream="vllm_ascend/spec_decode/__init__.py, get_spec_decode_method",
    versions=_VERSIONS,
    remove_when="vLLM-Ascend makes drafters of classes that users give",
)
_SAMPLER = Patch(
    target="vllm_ascend.sample.rejection_sampler:AscendRejectionSampler.forward",
    parameters=("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
    make=verified,
    why="drafts would change which tokens are sampled, though not their distribution",
    upstream="vllm_ascend/sample/rejection_sampler.py",
    versions=_VERSIONS,
    remove_when="vLLM-Ascend can verify drafts by the noise of seed and position",
)
