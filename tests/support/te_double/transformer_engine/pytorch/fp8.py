"""Names that megatron-core imports to know that Transformer Engine is there; FP8 is off."""

from contextlib import nullcontext


class FP8GlobalStateManager:
    """Says that nothing is in FP8."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Of the context."""
        return False


def fp8_autocast(enabled: bool = False, **_: object) -> "nullcontext[None]":
    """No cast."""
    assert not enabled
    return nullcontext()
