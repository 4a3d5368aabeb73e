"""The class of quantised tensors, of which there are none."""


class QuantizedTensor:
    """Never made."""
