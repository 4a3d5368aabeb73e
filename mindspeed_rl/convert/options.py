"""The command line of a conversion: MindSpeed-LLM's flags, v1 and v2, and Megatron's names."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl.core.errors import UsageError

# Largest default: a disk is no faster with more workers, and each takes memory.
_MOST_WORKERS = 4
# Flags of convert_ckpt.py (MindSpeed-LLM up to 26.1) and convert_ckpt_v2.py that repeat what
# config.json or the files say, or that tune the inside of those tools: (name, number of values).
_NO_MEANING = (
    ("--use-mcore-models", 0), ("--model-type", 1), ("--tokenizer-model", 1), ("--spec", "*"),
    ("--add-qkv-bias", 0), ("--save-layer-by-layer", 0), ("--ckpt-cfg-path", 1),
    ("--max-queue-size", 1), ("--no-checking", 0), ("--trust-remote-code", 0), ("--loader", 1),
    ("--saver", 1), ("--megatron-path", 1), ("--hidden-size", 1), ("--true-vocab-size", 1),
    ("--source-tensor-parallel-size", 1), ("--source-pipeline-parallel-size", 1),
    ("--source-expert-parallel-size", 1), ("--load-hf-from-config", 0), ("--vocab-file", 1),
    ("--ai-framework", 1),
)  # fmt: skip
# Flags that this tool does not support: (name, number of values, advice).
_REFUSED = (
    ("--qlora-nf4", 0, "4-bit weights are not written; leave the flag out"),
    ("--lora-load", 1, "merge the adapter with MindSpeed-LLM's tool first"),
    ("--lora-r", 1, "merge the adapter with MindSpeed-LLM's tool first"),
    ("--lora-alpha", 1, "merge the adapter with MindSpeed-LLM's tool first"),
    ("--lora-target-modules", "*", "merge the adapter with MindSpeed-LLM's tool first"),
    ("--save-lora-to-hf", 0, "merge the adapter with MindSpeed-LLM's tool first"),
    ("--orm", 0, "reward models keep their Hugging Face checkpoint"),
    ("--load-checkpoint-loosely", 0, "a conversion leaves nothing out; leave the flag out"),
    ("--schedules-method", 1, "dualpipev places layers unlike any layout here; use "
                              "--num-layers-per-virtual-pipeline-stage"),
    ("--save-to-legacy", 0, "models before megatron-core are not written; leave the flag out"),
    ("--add-dense-bias", 0, "no supported family has biases there; leave the flag out"),
    ("--add-output-layer-bias", 0, "no supported family has one; leave the flag out"),
    ("--w-pack", 1, "no supported family joins queries, keys and values; leave the flag out"),
    ("--post-norm", 0, "no supported family has norms there; leave the flag out"),
)  # fmt: skip
# --model-type-hf of MindSpeed-LLM -> possible families; v1 calls all Llama-like models llama2.
MODEL_TYPES = {
    "llama2": ("llama", "qwen2"),
    "llama3": ("llama",),
    "qwen25": ("qwen2",),
    "qwen3": ("qwen3",),
    "qwen3-moe": ("qwen3_moe",),
    "deepseek3": ("deepseek_v3",),
}


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """What to convert into what; names and meanings of the flags.

    Sizes are numbers of ranks. ``mtp_num_layers`` 0 drops multi-token prediction. An empty
    ``params_dtype`` keeps the types of the source.
    """

    load_model_type: str
    save_model_type: str
    load_dir: str
    save_dir: str
    hf_cfg_dir: str
    ckpt_format: str
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int
    expert_tensor_parallel: int | None
    num_layers_per_virtual_pipeline_stage: int | None
    num_layer_list: str
    noop_layers: str
    moe_tp_extend_ep: bool
    moe_grouped_gemm: bool
    mla_mm_split: bool
    transformer_impl: str
    mtp_num_layers: int
    make_vocab_size_divisible_by: int
    num_layers: int | None
    first_k_dense_replace: int | None
    model_type_hf: str
    params_dtype: str
    max_shard_size_gb: float
    workers: int
    verify: bool
    no_progress: bool


def without_effect(options: ConversionOptions) -> list[str]:
    """List the layout flags that were given but do not apply to the target."""
    if options.save_model_type == "mg" and options.ckpt_format == "torch":
        return []
    whole = options.save_model_type == "mg"
    given = (
        ("--target-tensor-parallel-size", options.tensor_parallel > 1),
        ("--target-pipeline-parallel-size", options.pipeline_parallel > 1),
        ("--target-expert-parallel-size", options.expert_parallel > 1),
        ("--expert-tensor-parallel-size", options.expert_tensor_parallel),
        ("--num-layers-per-virtual-pipeline-stage", options.num_layers_per_virtual_pipeline_stage),
        ("--num-layer-list", options.num_layer_list),
        ("--moe-grouped-gemm", options.moe_grouped_gemm),
        ("--mla-mm-split", options.mla_mm_split),
        ("--transformer-impl", not whole and options.transformer_impl != "local"),
    )
    return [name for name, on in given if on]


def parse_options(argv: Sequence[str]) -> ConversionOptions:
    """Parse the options of a command line.

    Raises:
        UsageError: A flag that this tool does not support.
        SystemExit: Unknown or malformed flags, with argparse's message, or ``--help``.
    """
    values = vars(_parser().parse_args(argv))
    for name, _, help_text in _REFUSED:
        if values.pop(_destination(name)) not in (None, False):
            raise UsageError(f"{name}: not supported; {help_text}")
    for name, _ in _NO_MEANING:
        values.pop(_destination(name))
    return ConversionOptions(**values)


def _destination(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convert_checkpoint.py",
        allow_abbrev=False,
        description="Converts checkpoints between Hugging Face and Megatron, any layout to any "
        "layout. Command lines of MindSpeed-LLM's convert_ckpt.py and convert_ckpt_v2.py work.",
        epilog="A killed conversion goes on when the same command is given again. --save-dir "
        "appears when everything is on disk, never before.",
    )
    _add_formats(parser)
    _add_layout(parser)
    _add_work(parser)
    silent = parser.add_argument_group(
        "accepted without effect", " ".join(name for name, _ in _NO_MEANING)
    )
    for name, count in (*_NO_MEANING, *((name, count) for name, count, _ in _REFUSED)):
        if count == 0:
            silent.add_argument(name, action="store_true", help=argparse.SUPPRESS)
        else:
            nargs = "*" if count == "*" else None
            silent.add_argument(name, nargs=nargs, help=argparse.SUPPRESS)
    return parser


def _add_formats(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what")
    add = group.add_argument
    kinds = ("hf", "mg")
    for name, default in (("--load-model-type", "hf"), ("--save-model-type", "mg")):
        add(name, default=default, choices=kinds, help=f"Hugging Face or Megatron [{default}].")

    add("--load-dir", required=True, metavar="DIR", help="What is converted; never written to.")
    add("--save-dir", required=True, metavar="DIR", help="What is made; must not exist, or empty.")
    add(
        "--hf-cfg-dir",
        default="",
        metavar="DIR",
        help="config.json and tokenizer of a Megatron source. Without it they are taken from "
        "--save-dir, and the result goes into --save-dir/mg2hf.",
    )
    add(
        "--ckpt-format",
        default="torch",
        choices=("torch", "torch_dist"),
        help="Of a Megatron target. torch: iter_0000001/mp_rank_*, one file per rank of the "
        "layout, names of MindSpeed-LLM; torch_dist: megatron-core's, which every layout loads. "
        "Sources are recognised [%(default)s].",
    )
    add("--model-type-hf", default="", help="Checked against config.json where it is given.")
    add("--params-dtype", default="", choices=("", "bf16", "fp16", "fp32"),
        help="Element type; without it, that of the source. FP8 blocks become bf16.")  # fmt: skip
    add("--mtp-num-layers", type=_count, default=0, metavar="N",
        help="Layers of multi-token prediction to keep: all, or 0 [0].")  # fmt: skip


def _add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout of a Megatron target")
    add = group.add_argument
    for axis, default, what in (
        ("tensor", 1, "that share each layer"),
        ("pipeline", 1, "stages"),
        ("expert", 1, "that share the experts"),
    ):
        add(
            f"--target-{axis}-parallel-size",
            f"--{axis}-model-parallel-size",
            dest=f"{axis}_parallel",
            type=_size,
            default=default,
            metavar="N",
            help=f"Ranks {what} [{default}]." if axis != "pipeline" else "Pipeline stages [1].",
        )
    add("--expert-tensor-parallel-size", dest="expert_tensor_parallel", type=_size, metavar="N",
        help="Ranks that share each expert: 1, or all tensor-parallel ones.")  # fmt: skip
    add("--num-layers-per-virtual-pipeline-stage", type=_size, metavar="N",
        help="Layers of each chunk of an interleaved pipeline.")  # fmt: skip
    add("--num-layer-list", default="", metavar="N,N,...", help="Layers of each stage.")
    add("--noop-layers", default="", metavar="N,N,...", help="Slots that hold no layer.")
    add("--moe-tp-extend-ep", action="store_true",
        help="Tensor-parallel ranks extend expert parallelism; experts are whole.")  # fmt: skip
    add("--moe-grouped-gemm", action="store_true", help="The experts of a rank in one module.")
    add("--mla-mm-split", action="store_true", help="Latent attention by kind of channel.")
    add("--transformer-impl", default="local", choices=("local", "transformer_engine"),
        help="Whose names parameters have [%(default)s].")  # fmt: skip
    add("--make-vocab-size-divisible-by", type=_size, default=1, metavar="N",
        help="The vocabulary is padded to a multiple of this times the tensor-parallel size "
        "[1].")  # fmt: skip
    add("--num-layers", type=_size, metavar="N", help="Checked against config.json.")
    add("--first-k-dense-replace", type=_count, metavar="N", help="Checked against config.json.")


def _add_work(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how")
    add = group.add_argument
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    workers = min(_MOST_WORKERS, cores)
    add("--max-shard-size-gb", type=_positive, default=4.0, metavar="GB",
        help="Largest file of a Hugging Face target, in 10^9 bytes [4].")  # fmt: skip
    add("--workers", type=_size, default=workers, metavar="N",
        help=f"Threads; each takes about 100 MB of memory, these {100 * workers} MB in all "
        f"[cores, at most {_MOST_WORKERS}: {workers}].")  # fmt: skip
    add("--verify", action="store_true",
        help="Compare every bit of every tensor, source against result, before the result gets "
        "its name.")  # fmt: skip
    add("--no-progress", action="store_true", help="No progress bar.")


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value
