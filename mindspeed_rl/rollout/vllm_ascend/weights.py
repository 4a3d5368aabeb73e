"""Renews the derived state of a vLLM-Ascend model after its weights were written."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mindspeed_rl.rollout.vllm_ascend.experts import ExpertLayouts


class AscendWeights:
    """Derived state of the experts and the latent attention of one built model on this rank.

    The engine's own processing renews all of it: it converts experts to kernel layout and computes
    the two products of latent attention from its key/value up projection.

    Args:
        model: vLLM's built model.
        process: Runs the engine's processing of the whole model after loading.
    """

    packs_experts = False

    def __init__(self, model: torch.nn.Module, process: Callable[[], None]) -> None:
        self.experts = ExpertLayouts(model)
        self._process = process

    def views(self, params: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the parameters with experts in kernel layout, as the weight layout has them."""
        return self.experts.views(params)

    def begin(self) -> None:
        """Prepare the experts for the engine's own loading."""
        self.experts.open()

    def finish(self) -> None:
        """Let the engine derive its state from the weights that were written."""
        self.experts.close(self._process)
