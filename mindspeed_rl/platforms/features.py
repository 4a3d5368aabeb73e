"""What megatron-core may use on a kind of device: fusions, overlap, where its memory is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransformerFeatures:
    """Features of a device. Without arguments nothing is used, which is right everywhere.

    Attributes:
        fusions: fields of megatron-core's ``TransformerConfig`` that are on where no flag turns
            them off.
        builds_on_device: parameters are made on the device, not on the host and moved.
        frees_sent_outputs: the output of a pipeline stage leaves memory as soon as it is being
            sent, which is right where sends are queued behind what computed it.
        overlaps_reduction: gradients are reduced while others are computed, if that is asked for.
        chooses_dispatcher: tokens get to their experts as it is asked for, else by all-to-all.
    """

    fusions: frozenset[str] = frozenset()
    builds_on_device: bool = False
    frees_sent_outputs: bool = False
    overlaps_reduction: bool = False
    chooses_dispatcher: bool = False
