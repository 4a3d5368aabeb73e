"""Modules, fused kernels and overlap of the trainer: what flags and installed packages choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.flag import flag, flag_names
from mindspeed_rl.core.installed import (
    has_transformer_engine,
    probable_platform,
    resolve_platform,
)
from mindspeed_rl.models.param_names import GROUPED, LOCAL, TRANSFORMER_ENGINE, ParamNames

# Dispatchers of megatron-core that are used as given; others are computed as alltoall.
DISPATCHERS = ("alltoall", "allgather")


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Kernels and overlap of the trainer.

    Megatron's switches. Fusions that the device has are on unless a flag turns them off. A CPU has
    neither fused kernels nor streams: there these flags do nothing, and the start of a run says so.

    Example: --overlap-grad-reduce --no-gradient-accumulation-fusion
    """

    bias_swiglu_fusion: bool = flag(
        True,
        "Compute the gated activation operator by operator; on CUDA, and in MindSpeed's modules, "
        "it is one kernel.",
    )
    bias_dropout_fusion: bool = flag(
        True, "Add to the residual stream operator by operator; on CUDA it is compiled."
    )
    rope_fusion: bool = flag(
        True,
        "Rotate queries and keys operator by operator; on CUDA with Transformer Engine it is one "
        "kernel, except in latent attention.",
    )
    gradient_accumulation_fusion: bool = flag(
        True,
        "Add weight gradients up in a step of their own; on CUDA with Apex's extension "
        "fused_weight_gradient_mlp_cuda the GEMM adds them up.",
    )
    moe_permute_fusion: bool = flag(
        False,
        "Sort tokens by expert, and back, in one kernel each: Transformer Engine's on CUDA, "
        "MindSpeed's on NPU.",
    )
    moe_shared_expert_overlap: bool = flag(
        False,
        "Compute the shared experts while tokens travel to the others; on CUDA, with the alltoall "
        "dispatcher.",
    )
    overlap_grad_reduce: bool = flag(
        False,
        "Reduce the gradients of layers that are done while those before them are computed.",
    )
    moe_token_dispatcher_type: str = flag(
        "alltoall",
        "How tokens get to their experts. alltoall: each to the ranks that have them; allgather: "
        "all to all ranks. alltoall_seq and flex are computed as alltoall.",
        choices=(*DISPATCHERS, "alltoall_seq", "flex"),
    )

    def idle_flags(self, obeyed: bool, overlaps_shared_experts: bool) -> Iterator[str]:
        """Yield the flags that were given and do nothing, with the reason.

        Args:
            obeyed: Whether the device has fused kernels or streams that the flags switch.
            overlaps_shared_experts: Whether ``--moe-shared-expert-overlap`` is obeyed there.
        """
        given = [field for field in fields(self) if getattr(self, field.name) != field.default]
        names = ", ".join(flag_names(field)[0] for field in given)
        dispatcher = self.moe_token_dispatcher_type
        if names and not obeyed:
            yield f"{names} (the device has neither fused kernels nor streams to overlap)"
            return
        if dispatcher not in DISPATCHERS:
            yield f"--moe-token-dispatcher-type {dispatcher} (computed as alltoall)"
        if self.moe_shared_expert_overlap and not overlaps_shared_experts:
            yield "--moe-shared-expert-overlap (only CUDA has it)"
        elif self.moe_shared_expert_overlap and dispatcher == "allgather":
            yield "--moe-shared-expert-overlap (needs --moe-token-dispatcher-type alltoall)"


def module_names(model: ModelConfig, platform: str) -> ParamNames:
    """The modules of ``--transformer-impl`` and ``--moe-grouped-gemm`` on ``--platform``.

    A script may ask for Transformer Engine where there is none; it then gets local modules. On CUDA
    ``auto`` groups experts as well.
    """
    chosen = model.transformer_impl == "auto"
    kind = probable_platform(platform) if chosen else resolve_platform(platform)
    if model.transformer_impl == "local" or not has_transformer_engine(kind):
        return LOCAL
    grouped = model.moe_grouped_gemm or (chosen and kind == "cuda")
    return GROUPED if grouped else TRANSFORMER_ENGINE


def check_expert_modules(modules: ParamNames, platform: str, tp: int, has_experts: bool) -> None:
    """Refuse MindSpeed's linear layers for single experts under tensor parallelism.

    Each rank has other tokens inside an expert. With expert tensor parallelism the first layer
    gathers them once more, which fails; without it, its backward sums the gradients of different
    tokens over the tensor-parallel group, which fails or is silently wrong
    (``mindspeed/te/pytorch/module/linear.py`` of core_r0.16.0, ``ColumnParallelNoSeq``).

    Raises:
        UsageError: Experts are such layers; the fix is the flag that groups them.
    """
    mindspeed = resolve_platform(platform) == "npu" and modules == TRANSFORMER_ENGINE
    if mindspeed and has_experts and tp > 1:
        raise UsageError(
            f"--tensor-model-parallel-size {tp} with experts that are computed one by one: "
            "MindSpeed's linear layers exchange the tokens of an expert a second time, or sum the "
            "gradients of different tokens; add --moe-grouped-gemm"
        )


def experts_note(model: ModelConfig, platform: str) -> list[str]:
    """The line for a ``--moe-grouped-gemm`` that has no effect with ``--transformer-impl local``.

    Scripts of MindSpeed-LLM pass both.
    """
    if platform == "cpu" or not (model.moe_grouped_gemm and model.transformer_impl == "local"):
        return []
    return [
        "without --moe-grouped-gemm: --transformer-impl local computes experts one by one; add "
        "--transformer-impl transformer_engine to compute them in one grouped GEMM"
    ]


def modules_note(model: ModelConfig, platform: str) -> list[str]:
    """The line of the log for a ``--transformer-impl`` whose modules are not installed."""
    if model.transformer_impl != "transformer_engine" or has_transformer_engine(platform):
        return []
    return [
        "--transformer-impl transformer_engine: Transformer Engine is not installed here, the "
        "model is built of megatron-core's local modules"
    ]
