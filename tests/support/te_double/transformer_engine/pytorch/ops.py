"""Fusible operations, which megatron-core names in signatures; --use-te-op-fuser is not there."""


class FusibleOperation:
    """Never made."""


class Sequential(FusibleOperation):
    """Never made."""
