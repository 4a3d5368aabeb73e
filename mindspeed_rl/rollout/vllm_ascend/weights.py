"""State of a vLLM-Ascend model that follows from its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mindspeed_rl.rollout.vllm_ascend.experts import ExpertLayouts


class AscendWeights:
    """Experts and latent attention of one built model on this rank.

    The engine's own processing derives everything: experts back to kernel layout, the two products
    of latent attention from its key/value up projection.

    Args:
        model: vLLM's model, built.
        process: the engine's processing of the whole model after loading.
    """

    packs_experts = False

    def __init__(self, model: torch.nn.Module, process: Callable[[], None]) -> None:
        self.experts = ExpertLayouts(model)
        self._process = process

    def views(self, params: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Experts in kernel layout, as the layout of the weights declares them."""
        return self.experts.views(params)

    def begin(self) -> None:
        """Experts take part in the engine's own loading from now on."""
        self.experts.open()

    def finish(self) -> None:
        """Everything follows from the weights that were written."""
        self.experts.close(self._process)
