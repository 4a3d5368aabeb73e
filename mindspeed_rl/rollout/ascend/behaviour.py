"""What a weight update has to know about each version of vLLM-Ascend, read in its sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mindspeed_rl.rollout.ascend_versions import ascend_version


@dataclass(frozen=True, slots=True)
class AscendBehaviour:
    """One version.

    Attributes:
        wake_transposes: waking the weights turns experts to loader layout.
        turns_once: processing turns experts the first time only, by a mark in their method.
        latent_rebinds: processing puts the products of latent attention at new addresses, so that
            captured graphs would read the old ones.
        cache_bytes: the size of the key/value cache is honoured; elsewhere it is given in blocks.
        emulated: its own classes went through three updates on the emulator; elsewhere only fakes
            that do what its sources say.
    """

    wake_transposes: bool
    turns_once: bool = False
    latent_rebinds: bool = False
    cache_bytes: bool = False
    emulated: bool = False


BEHAVIOUR: Mapping[str, AscendBehaviour] = MappingProxyType(
    {
        "0.11": AscendBehaviour(wake_transposes=False, turns_once=True, latent_rebinds=True),
        "0.13": AscendBehaviour(wake_transposes=True, latent_rebinds=True),
        "0.18": AscendBehaviour(wake_transposes=True),
        "0.23": AscendBehaviour(wake_transposes=True, cache_bytes=True, emulated=True),
        "main": AscendBehaviour(wake_transposes=False, cache_bytes=True),
    }
)


def behaviour_of(full_version: str) -> AscendBehaviour:
    """The row of an installed version.

    Raises:
        ValueError: there is none; says why.
    """
    column = ascend_version(full_version)
    if column not in BEHAVIOUR:
        raise ValueError(
            f"vLLM-Ascend {full_version}: vLLM {column} gives log-probs before temperature only "
            "(it has no logprobs_mode), which are not those of the trainer; install the version "
            "of mindspeed_rl/versions.cfg"
        )
    return BEHAVIOUR[column]
