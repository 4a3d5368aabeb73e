"""The flags of existing pretraining scripts and what they mean in an RL run (layer 0)."""

from mindspeed_rl.compat.classify import (
    ForeignUse,
    UnknownToken,
    UsedFlag,
    classify,
    foreign_flags,
    nearest,
)
from mindspeed_rl.compat.dispositions import Disposition, ForeignFlag

__all__ = [
    "Disposition",
    "ForeignFlag",
    "ForeignUse",
    "UnknownToken",
    "UsedFlag",
    "classify",
    "foreign_flags",
    "nearest",
]
