"""The interface of a backend: how a platform builds vLLM, keeps its weights and frees its memory.

:class:`~mindspeed_rl.engines.vllm.engine.VllmEngine` is the same on all platforms, and uses the
backend of its platform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mindspeed_rl.engines.vllm.expert_load import ExpertLoad
from mindspeed_rl.engines.vllm.expert_maps import place_experts
from mindspeed_rl.rollout.open_requests import ExpertSource
from mindspeed_rl.vllm_patches.step_sync import StepSync

ROUTING_STRATEGY = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
"""Variable that makes vLLM route at random, evenly. A built engine goes on with what its variables
were then."""


class DerivedWeights(Protocol):
    """State of the built model that is derived from its weights once per update."""

    @property
    def packs_experts(self) -> bool:
        """Whether expert parameters are in the order of a kernel between updates."""
        ...

    def views(self, params: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the parameters within an update as the layout has them, in the same memory."""
        ...

    def begin(self) -> None:
        """Prepare the model for weights to be written."""
        ...

    def finish(self) -> None:
        """Derive the state from the weights, all of which were written."""
        ...


class FreeableMemory(Protocol):
    """A part of the engine's memory that is freed as a whole."""

    @property
    def num_bytes(self) -> int:
        """Size of the memory while it is allocated."""
        ...

    def free(self) -> None:
        """Free the memory; no effect when it is freed already."""
        ...

    def bring_back(self) -> None:
        """Allocate all of the memory again, or nothing when the device has too little."""
        ...


class CountedTokens(Protocol):
    """The tokens of the experts of some layers, counted on this rank."""

    def take(self) -> torch.Tensor:
        """Return the counts, [layers, experts] int64 on the host, and begin anew."""
        ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of a built engine.

    Attributes:
        model: vLLM's model, without wrappers.
        derived: State that is derived from the weights.
        weights: Memory of the weights.
        cache: Memory of the key/value cache.
        stable_addresses: Whether memory comes back at its address, so that graphs stay valid.
        weight_format: Description of the memory format of the weights, for the log; may be empty.
        place_experts: Sets which rank has which experts; the arguments are those of
            :func:`~mindspeed_rl.engines.vllm.expert_maps.place_experts`.
        count_tokens: Begins to count the tokens of experts; the arguments are those of
            :class:`~mindspeed_rl.engines.vllm.expert_load.ExpertLoad`.
    """

    model: torch.nn.Module
    derived: DerivedWeights
    weights: FreeableMemory
    cache: FreeableMemory
    stable_addresses: bool
    weight_format: str = ""
    place_experts: Callable[..., None] = place_experts
    count_tokens: Callable[..., CountedTokens] = ExpertLoad


class Backend(Protocol):
    """The way in which an engine is built on one platform."""

    def settings(self, options: Mapping[str, object]) -> dict[str, Any]:
        """Merge the user's options with our arguments of ``vllm.LLM``.

        Ours follow from the model, the platform and our flags.

        Raises:
            UsageError: An option of the user conflicts with a value that we need.
        """
        ...

    def prepare(self) -> StepSync | None:
        """Patch vLLM before the engine is built. Collective: the world.

        Returns:
            Our packed reduction of the data-parallel ranks, where it is in use.
        """
        ...

    def parts(self, llm: Any) -> EngineParts:
        """Find the parts of a built engine. Collective: the world."""
        ...

    def experts(self, llm: Any, layers: Sequence[int]) -> ExpertSource:
        """Return the record of the experts that a built engine chooses in some layers. Local."""
        ...
