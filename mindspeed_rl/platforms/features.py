"""The features that megatron-core may use on a device: fusions, overlap and construction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransformerFeatures:
    """Features of a device; without arguments none is used, which is correct on every device.

    Attributes:
        fusions: Fields of megatron-core's ``TransformerConfig`` that are on where no flag turns
            them off.
        builds_on_device: Whether parameters are created on the device, not moved there.
        frees_sent_outputs: Whether the output of a pipeline stage is freed as soon as its send is
            queued, which is correct where sends are queued behind the computation of the output.
        overlaps_reduction: Whether the flag for reducing gradients during computation is obeyed.
        chooses_dispatcher: Whether the flag for the token dispatcher is obeyed; otherwise tokens
            get to their experts by all-to-all.
    """

    fusions: frozenset[str] = frozenset()
    builds_on_device: bool = False
    frees_sent_outputs: bool = False
    overlaps_reduction: bool = False
    chooses_dispatcher: bool = False
