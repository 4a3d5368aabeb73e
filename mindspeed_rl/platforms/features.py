"""The features of a device: fusions, overlap, construction, and the attention of packed rows."""

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
        overlaps_shared_experts: Whether shared experts are computed while tokens travel, where a
            flag asks for it.
        chooses_dispatcher: Whether the flag for the token dispatcher is obeyed; otherwise tokens
            get to their experts by all-to-all.
        exchanges_uneven_pieces: Whether collectives take the pieces of unequal sizes that
            megatron-core sends to experts; otherwise patches make the exchange work.
        packed_attention: The kernel that attends to packed rows, a name of
            ``attention.kernels.KERNELS``.
    """

    fusions: frozenset[str] = frozenset()
    builds_on_device: bool = False
    frees_sent_outputs: bool = False
    overlaps_reduction: bool = False
    overlaps_shared_experts: bool = False
    chooses_dispatcher: bool = False
    exchanges_uneven_pieces: bool = False
    packed_attention: str = "padded_sdpa"

    @property
    def obeys_kernel_flags(self) -> bool:
        """Whether some flag of fused kernels or of overlap changes what the device does."""
        return bool(self.fusions) or self.overlaps_reduction or self.chooses_dispatcher
