"""What differs between engines of one interface: how they are built, keep weights and give memory.

:class:`~mindspeed_rl.rollout.vllm.engine.VllmEngine` is the same everywhere; a backend is chosen
once by platform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mindspeed_rl.rollout.step_loop import RankAgreement


class DerivedWeights(Protocol):
    """State of the built model that follows from its weights, once per update."""

    @property
    def packs_experts(self) -> bool:
        """Whether expert parameters have a kernel's own order between updates."""
        ...

    def views(self, params: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The parameters as the layout declares them, within an update. Same memory."""
        ...

    def begin(self) -> None:
        """Weights are about to be written."""
        ...

    def finish(self) -> None:
        """All weights were written."""
        ...


class FreeableMemory(Protocol):
    """A part of the engine's memory that leaves as a whole."""

    @property
    def num_bytes(self) -> int:
        """While it is there."""
        ...

    def free(self) -> None:
        """Give it back; no effect when it is away."""
        ...

    def bring_back(self) -> None:
        """All of it, or nothing when memory runs out."""
        ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A built engine.

    Attributes:
        model: vLLM's model, without wrappers.
        derived: what follows from its weights.
        weights: memory of the weights.
        cache: memory of the key/value cache.
        stable_addresses: memory comes back where it was, so that captured graphs stay valid.
        weight_format: what is known of the memory format of the weights, for people; may be empty.
    """

    model: torch.nn.Module
    derived: DerivedWeights
    weights: FreeableMemory
    cache: FreeableMemory
    stable_addresses: bool
    weight_format: str = ""


class Backend(Protocol):
    """How an engine is built on one platform."""

    def settings(self, options: Mapping[str, object]) -> dict[str, Any]:
        """Arguments of ``vllm.LLM`` from the model, the platform and our flags, then the user's.

        Raises:
            UsageError: the user set what has to have another value.
        """
        ...

    def cache_settings(self, kv_cache_bytes: int, dtype: str) -> dict[str, Any]:
        """The size of the key/value cache, as an argument of ``vllm.LLM``."""
        ...

    def prepare(self) -> RankAgreement | None:
        """Patch vLLM before it is built. Collective: the world.

        Returns:
            Our reduction of the data-parallel ranks, where it is in use.
        """
        ...

    def parts(self, llm: Any) -> EngineParts:
        """Take a built engine apart. Collective: the world."""
        ...
