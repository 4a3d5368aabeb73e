"""Nothing of it is used without FP8."""

from types import SimpleNamespace


class DelayedScaling:
    """The base of a class that is never made."""


recipe = SimpleNamespace(DelayedScaling=DelayedScaling)
