"""What a checkpoint format declares of itself, and what it is asked to write.

The file of a format ends with its ``FORMAT``; ``formats.py`` has the list of them. Flags, help,
recognition of sources, refusals and the check of a result follow from what is declared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mindspeed_rl.convert.checkpoint_files import whole_layout
from mindspeed_rl.convert.source import Source
from mindspeed_rl.convert.target import Target
from mindspeed_rl.core.boxes import Shape
from mindspeed_rl.core.flag import flag
from mindspeed_rl.models.param_names import ParamNames
from mindspeed_rl.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayoutFlags:
    """The layout of a target in a Megatron format."""

    tensor_parallel: int = flag(
        1,
        "Ranks that share each layer.",
        names=("--target-tensor-parallel-size", "--tensor-model-parallel-size"),
        minimum=1,
    )
    pipeline_parallel: int = flag(
        1,
        "Pipeline stages.",
        names=("--target-pipeline-parallel-size", "--pipeline-model-parallel-size"),
        minimum=1,
    )
    expert_parallel: int = flag(
        1,
        "Ranks that share the experts.",
        names=("--target-expert-parallel-size", "--expert-model-parallel-size"),
        minimum=1,
    )
    expert_tensor_parallel: int | None = flag(
        None,
        "Ranks that share each expert: 1, or all tensor-parallel ones.",
        names=("--expert-tensor-parallel-size",),
        minimum=1,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "Layers of each chunk of an interleaved pipeline.", minimum=1
    )
    num_layer_list: str = flag("", "Layers of each stage, like 7,8,8,7.")
    noop_layers: str = flag("", "Slots that hold no layer, like 94,95.")
    moe_tp_extend_ep: bool = flag(
        False, "Tensor-parallel ranks extend expert parallelism; experts are whole."
    )
    moe_grouped_gemm: bool = flag(False, "The experts of a rank in one module.")
    mla_mm_split: bool = flag(False, "Latent attention by kind of channel.")
    transformer_impl: str = flag(
        "local", "Whose names parameters have.", choices=("local", "transformer_engine")
    )
    make_vocab_size_divisible_by: int = flag(
        1,
        "The vocabulary is padded to a multiple of this times the tensor-parallel size.",
        minimum=1,
    )


@dataclass(frozen=True)
class Request:
    """A checkpoint that a format is asked to write.

    Attributes:
        spec: Architecture of the model.
        config_dir: Directory with its ``config.json`` and tokenizer.
        source: Checkpoint whose tensors are written.
        shapes: Shape of every HF tensor that is written, in order.
        cast: Element type that is asked for; ``None`` keeps the types of the source.
        keeps_mtp: Whether layers of multi-token prediction are written.
        shard_bytes: Size at which a format without a layout begins a new file.
        layout: Layout that is asked for; a format reads the flags that it declares.
    """

    spec: ModelSpec
    config_dir: Path
    source: Source
    shapes: Mapping[str, Shape]
    cast: torch.dtype | None
    keeps_mtp: bool
    shard_bytes: int
    layout: LayoutFlags

    def dtypes(self) -> dict[str, torch.dtype]:
        """Element type of every HF tensor that is written; types that a family fixes stay."""
        declared = whole_layout(self.spec, ParamNames(), self.spec.vocab_size)
        fixed = {name for name in declared.hf_shapes if declared.dtype_of(name)}
        return {
            name: self.source.dtype_of(name) if self.cast is None or name in fixed else self.cast
            for name in self.shapes
        }


@dataclass(frozen=True, slots=True)
class Format:
    """A format of checkpoints: how it is recognised, opened and planned.

    Attributes:
        name: Value of ``--ckpt-format``.
        model_type: Value of ``--load-model-type`` and ``--save-model-type``: ``"hf"`` or ``"mg"``.
        files: Files that a folder of this format has, for messages.
        help: Description of a target, for the help of ``--ckpt-format``.
        recognises: Function that tells whether a folder holds tensors of this format.
        open: Function that opens such a folder as a source, given the model and whether
            ``--moe-tp-extend-ep`` was given, for files that do not tell.
        plan: Function that plans all files of a target.
        layout_flags: Fields of :class:`LayoutFlags` that ``plan`` reads.
        writes_mtp: Whether ``plan`` can write layers of multi-token prediction.
    """

    name: str
    model_type: str
    files: str
    help: str
    recognises: Callable[[Path], bool]
    open: Callable[[Path, ModelSpec, bool], Source]
    plan: Callable[[Request], Target]
    layout_flags: frozenset[str] = frozenset()
    writes_mtp: bool = True
