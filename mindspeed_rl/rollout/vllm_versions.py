"""What each vLLM version can do, as data: the only place with engine version knowledge.

Evidence for each row is a test that runs three syncs on that version.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """Capabilities of one engine version on one platform.

    Attributes:
        version: prefix of the version string.
        platform: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        in_place_dense: dense weights may be written into the live parameters.
        sleep_mode: the engine itself can free weights and cache.
    """

    version: str
    platform: str
    in_place_dense: bool
    sleep_mode: bool


CAPABILITIES = (EngineCapabilities("0.32.", "cpu", in_place_dense=True, sleep_mode=False),)


def engine_capabilities(version: str, platform: str) -> EngineCapabilities:
    """The row of an installed version.

    Raises:
        ValueError: no row: nothing was proven for it, and a wrong guess gives wrong rollouts.
    """
    for row in CAPABILITIES:
        if version.startswith(row.version) and platform == row.platform:
            return row
    known = ", ".join(f"{row.version}x on {row.platform}" for row in CAPABILITIES)
    raise ValueError(
        f"vLLM {version} on {platform} is not in the capability table; known: {known}. Install "
        "the version of mindspeed_rl/versions.cfg, or add a row with its three-syncs test"
    )
