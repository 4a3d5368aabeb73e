"""Table of what the engine of each platform can do, in the version that ``versions.cfg`` pins.

The row of the CPU is proven by tests that run three syncs on that version. The row of the NPU comes
from the sources of vLLM-Ascend, and its classes run three syncs on the emulator (``tests/ascend``).
The row of CUDA comes from vLLM's sources alone; for models without experts it holds for the older
release as well that belongs to torch 2.11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.versions import engine_versions, pins
from mindspeed_rl.engines.vllm.layout import EXPERT_MODULE, VllmLayout
from mindspeed_rl.models.layers import LatentAttention
from mindspeed_rl.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """Capabilities of the engine of one platform.

    Attributes:
        expert_multiple: Each rank's channels of an expert are padded to a multiple of this.
        whole_shared_experts: See :class:`~mindspeed_rl.engines.vllm.layout.VllmLayout`.
        transposed_experts: See :class:`~mindspeed_rl.engines.vllm.layout.VllmLayout`.
        expert_module: Path of the module with the experts of a layer, below the layer.
        packed_sync: Whether data-parallel ranks may agree through our packed reduction.
        own_drafts: Whether the engine's own drafts that need no weights are verified to change no
            token, as ours are; see :mod:`~mindspeed_rl.vllm_patches.verified_drafts`.
        routed_experts: Whether the routing of a response can be recorded; see
            :mod:`~mindspeed_rl.vllm_patches.routed_experts` and, for the builds and layouts
            of NPUs, :mod:`~mindspeed_rl.engines.vllm_ascend.routed_experts`.
        pauses: Whether a request may pause and keep its cache, with the pinned version; see
            :mod:`~mindspeed_rl.rollout.paused`.
        head_sizes: Channels per head that the attention kernels support; empty: not limited here.
        latent_sizes: Channels per token in the cache of latent attention that they support.
    """

    expert_multiple: int = 1
    whole_shared_experts: bool = True
    transposed_experts: bool = False
    expert_module: str = EXPERT_MODULE
    packed_sync: bool = False
    own_drafts: bool = False
    routed_experts: bool = False
    pauses: bool = False
    head_sizes: tuple[int, ...] = ()
    latent_sizes: tuple[int, ...] = ()


CAPABILITIES: Mapping[str, EngineCapabilities] = {
    "cpu": EngineCapabilities(
        expert_multiple=32,
        packed_sync=True,
        own_drafts=True,
        routed_experts=True,
        pauses=True,
        head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
        latent_sizes=(576,),
    ),
    # model_settings chooses the Triton kernel, which alone keeps experts as they are loaded.
    # A pause leaves the runner what a running request is that a step does not schedule: all that a
    # step reads of requests is copied to the device anew, and padding and dummy steps write nothing
    # into the cache.
    "cuda": EngineCapabilities(own_drafts=True, pauses=True),
    "npu": EngineCapabilities(
        whole_shared_experts=False,
        transposed_experts=True,
        expert_module="mlp.experts",
        packed_sync=True,
        routed_experts=True,
    ),
}


def can_pause(platform: str) -> bool:
    """Whether requests of the installed engine may pause. Local; vLLM is not imported.

    The older release on CUDA has another scheduler, which has not been examined.
    """
    engines = {name: pin for name, pin in pins(platform).items() if name.startswith("vllm")}
    return CAPABILITIES[platform].pauses and all(
        _minor(_installed_version(name, platform)) == _minor(pin) for name, pin in engines.items()
    )


def check_installed_engine(platform: str) -> None:
    """Refuse an engine of another minor version than the pinned one. Local; nothing is imported.

    ``MINDSPEED_RL_ALLOW_VERSIONS`` does not disable this check: the places of weights would be a
    guess, and a wrong guess gives wrong rollouts.

    Raises:
        UsageError: No engine is installed, or another version; names it and the pinned one.
    """
    for name in pins(platform):
        if not name.startswith("vllm"):
            continue
        installed, known = _installed_version(name, platform), engine_versions(platform, name)
        if _minor(installed) not in map(_minor, known):
            raise UsageError(
                f"{name} {installed} on {platform}: where it keeps its weights is known of "
                f"{' and '.join(known)} only; {_how_to_install(platform)}"
            )


def _how_to_install(platform: str) -> str:
    """Return what installs the engine of a platform; the script of the CPU is for that alone."""
    if platform == "cpu":
        return "run pretrain_scripts/setup_env.sh"
    if platform == "cuda":
        return (
            "pip install -e '.[cuda]', or '.[cuda-torch211]' beside torch 2.11 (docs/install.md, "
            "CUDA)"
        )
    return "install it as docs/install.md, Ascend NPU, says"


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _installed_version(name: str, platform: str) -> str:
    """Return the installed version of a distribution; vLLM for the CPU has one of two names."""
    for spelling in (name, name.removesuffix("-cpu")):
        try:
            return version(spelling)
        except PackageNotFoundError:
            continue
    raise UsageError(f"{name} is not installed; {_how_to_install(platform)}")


def installed_layout(layout: VllmLayout, platform: str) -> VllmLayout:
    """Adapt the layout to how the installed engine keeps experts. Local; vLLM is not imported.

    Raises:
        UsageError: See :func:`check_installed_engine`.
    """
    check_installed_engine(platform)
    if not layout.spec.expert_layers:
        return layout
    row = CAPABILITIES[platform]
    if platform == "cuda":
        _check_experts(_installed_version("vllm", platform), pins(platform)["vllm"])
    return replace(
        layout,
        expert_multiple=row.expert_multiple,
        whole_shared_experts=row.whole_shared_experts,
        transposed_experts=row.transposed_experts,
        expert_module=row.expert_module,
    )


def _check_experts(installed: str, pinned: str) -> None:
    if _minor(installed) != _minor(pinned):
        raise UsageError(
            f"vllm {installed} on cuda: where it keeps experts is known of {pinned} only; take "
            "that set (docs/install.md, CUDA), or a model without experts"
        )


def check_model_support(platform: str, spec: ModelSpec) -> None:
    """Refuse models for which the engine has no kernels.

    Raises:
        UsageError: No kernel has the size; names it and those that are supported.
    """
    row = CAPABILITIES[platform]
    for attention in spec.attentions:
        size, known, keys = attention.head_dim, row.head_sizes, "head_dim"
        if isinstance(attention, LatentAttention):
            size, known = attention.kv_a_size, row.latent_sizes
            keys = "kv_lora_rank + qk_rope_head_dim"
        if known and size not in known:
            raise UsageError(
                f"config.json: {keys} {size}: vLLM on {platform} has attention kernels for "
                f"{', '.join(map(str, known))} channels only; run it on another device"
            )
