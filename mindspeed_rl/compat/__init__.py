"""The flags of existing pretraining scripts and what they mean in an RL run."""

from mindspeed_rl.compat.classify import ForeignUse, UnknownToken, UsedFlag, classify, nearest
from mindspeed_rl.compat.foreign_flags import Comparison, Disposition, ForeignFlag, foreign_flags

__all__ = [
    "Comparison",
    "Disposition",
    "ForeignFlag",
    "ForeignUse",
    "UnknownToken",
    "UsedFlag",
    "classify",
    "foreign_flags",
    "nearest",
]
