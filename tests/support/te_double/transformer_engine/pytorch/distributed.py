"""Names that megatron-core imports; nothing here calls them."""


class CudaRNGStatesTracker:
    """Of CUDA's generators; the base of a class that is never made."""


def activation_recompute_forward(*_: object, **__: object) -> None:
    """Of recomputation in FP8."""
    raise NotImplementedError
