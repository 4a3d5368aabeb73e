"""Flags that have a meaning on Ascend NPUs only: features of MindSpeed and buffers of HCCL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from mindspeed_rl.config.model import ParallelConfig
from mindspeed_rl.config.training import TrainConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.flag import flag
from mindspeed_rl.core.groups import MEGATRON_GROUPS
from mindspeed_rl.core.installed import has_mindspeed
from mindspeed_rl.core.versions import mindspeed_branch


@dataclass(frozen=True, slots=True)
class NpuConfig:
    """Ascend NPU.

    MindSpeed's features under MindSpeed's names; its adaptor gets them before the first process
    group. On other platforms they do nothing (--swap-optimizer is refused there). Fused norms and
    activations are always on where MindSpeed is installed; attention is CANN's fused one.

    Example: --swap-optimizer --use-distributed-optimizer --hccl-group-buffer 'dp_cp:64;pp:32'
    """

    use_fused_rotary_pos_emb: bool = flag(False, "Rotate queries and keys in one kernel.")
    use_fused_moe_token_permute_and_unpermute: bool = flag(
        False,
        "Sort tokens by expert, and back, in one kernel each.",
    )
    swap_optimizer: bool = flag(
        False,
        "Keep the optimizer state on the host and bring it to the device in parts at every update; "
        "MindSpeed does it, so --rl-offload moves everything else. Needs "
        "--use-distributed-optimizer; on CPU and CUDA it is refused: --rl-offload optimizer.",
    )
    swap_optimizer_times: int = flag(16, "Parts in which --swap-optimizer moves.", minimum=1)
    npu_deterministic: bool = flag(
        False,
        "Deterministic kernels, and collectives that add ranks up in one order (HCCL_DETERMINISTIC "
        "strict); slower. The environment is set before torch_npu is loaded, and the start of the "
        "run says what is in force. Results that do not depend on the batch either need vLLM-"
        "Ascend's batch-invariant operators and VLLM_BATCH_INVARIANT=1.",
    )
    hccl_group_buffer: str = flag(
        "",
        "MiB of each of the two HCCL buffers of megatron-core's groups, like 'dp_cp:64;tp:200'; "
        f"the others have HCCL_BUFFSIZE (200). Names: {', '.join(MEGATRON_GROUPS)}. The start of a "
        "run and its dry run say which of them are in use. Groups of the engine have sizes of its "
        "own, but its dispatch of experts has HCCL_BUFFSIZE: unless the variable is set, a run "
        "raises it to what that needs, and keeps the groups here at 200.",
    )


@dataclass(frozen=True, slots=True)
class NpuSetup:
    """The settings for the bootstrap of an NPU process.

    Attributes:
        features: MindSpeed's arguments by name; empty without MindSpeed.
        group_buffers_mb: MiB of HCCL buffers by megatron-core's name of the group.
        buffer_mb: MiB of the buffers of all other groups (``HCCL_BUFFSIZE``); 0 leaves the
            environment as it is.
        notes: What was decided for the user, for the log at the start of a run.
        deterministic: Whether kernels and collectives must give the same bits again.
    """

    features: Mapping[str, object] = field(default_factory=dict)
    group_buffers_mb: Mapping[str, int] = field(default_factory=dict)
    deterministic: bool = False
    buffer_mb: int = 0
    notes: tuple[str, ...] = ()


# Flags that this project handles itself, without MindSpeed.
_OWN = ("npu_deterministic", "hccl_group_buffer")


def check_npu(npu: NpuConfig, parallel: ParallelConfig, platform: str) -> None:
    """Refuse flags that contradict each other on an NPU, and the one that needs an NPU.

    Args:
        npu: Flags of the features.
        parallel: Flags of the training layout.
        platform: Platform of the run, or ``"auto"`` for a CPU or CUDA.

    Raises:
        UsageError: The message names the flag and the fix.
    """
    if platform != "npu":
        if npu.swap_optimizer:
            raise UsageError(
                f"--swap-optimizer is done by MindSpeed, on NPUs only; on {platform} take "
                "--rl-offload optimizer, which moves the state out while the engine samples"
            )
        return
    if npu.swap_optimizer and not parallel.use_distributed_optimizer:
        raise UsageError("--swap-optimizer needs --use-distributed-optimizer; add it")
    group_buffers(npu.hccl_group_buffer)


def group_buffers(text: str) -> dict[str, int]:
    """Read ``--hccl-group-buffer``: megatron-core's name of a group -> MiB.

    Raises:
        UsageError: The text is not pairs of a name and a positive whole number, or megatron-core
            has no group of that name.
    """
    sizes: dict[str, int] = {}
    for pair in filter(None, (part.strip() for part in text.split(";"))):
        name, colon, size = (part.strip() for part in pair.partition(":"))
        if not (name and colon and size.isdecimal() and int(size) > 0) or name in sizes:
            raise UsageError(
                f"--hccl-group-buffer {text!r}: {pair!r} is not a new group:MiB; write it like "
                "dp_cp:64;tp:200"
            )
        if name not in MEGATRON_GROUPS:
            raise UsageError(
                f"--hccl-group-buffer {text!r}: no group {name!r}; there are "
                f"{', '.join(MEGATRON_GROUPS)}"
            )
        sizes[name] = int(size)
    return sizes


def npu_setup(
    npu: NpuConfig, parallel: ParallelConfig, train: TrainConfig, *, grouped: bool
) -> NpuSetup:
    """Make the settings of an NPU process from the flags of a run.

    Args:
        npu: Flags of the features.
        parallel: Flags of the training layout.
        train: Flags of precision and recomputation.
        grouped: Whether experts are computed in grouped GEMMs.

    Raises:
        UsageError: Features of MindSpeed were asked for, and it is not installed.
    """
    given = {
        f.name: getattr(npu, f.name)
        for f in fields(npu)
        if f.name not in _OWN and getattr(npu, f.name) != f.default
    }
    buffers = group_buffers(npu.hccl_group_buffer)
    if not has_mindspeed():
        if given:
            raise UsageError(
                f"--{min(given).replace('_', '-')} is a feature of MindSpeed, which is not "
                f"installed; install its branch {mindspeed_branch()}, or remove the flag"
            )
        return NpuSetup({}, buffers, npu.npu_deterministic)
    return NpuSetup(_features(given, parallel, train, grouped), buffers, npu.npu_deterministic)


def _features(
    given: Mapping[str, object], parallel: ParallelConfig, train: TrainConfig, grouped: bool
) -> dict[str, object]:
    """MindSpeed's arguments: those unlike its defaults, and those that its own checks read."""
    features: dict[str, object] = {
        "use_flash_attn": True,
        "use_fused_rmsnorm": True,
        "use_fused_swiglu": True,
        "swiglu": True,
        "position_embedding_type": "rope",
        "bf16": train.bf16,
        "use_distributed_optimizer": parallel.use_distributed_optimizer,
        **given,
    }
    if "use_fused_moe_token_permute_and_unpermute" in given:
        features["moe_permute_fusion"] = True
    if grouped:
        features["moe_grouped_gemm"] = True
    if train.recompute_granularity == "full":
        features["recompute_method"] = train.recompute_method
    return features
