"""The command line of a conversion: MindSpeed-LLM's flags, v1 and v2, and Megatron's names."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl.command_line.arguments import build_parser, parse_sections
from mindspeed_rl.compat.foreign_flags import Disposition, read_flags
from mindspeed_rl.convert.format import LayoutFlags
from mindspeed_rl.convert.formats import FORMATS
from mindspeed_rl.core.flag import flag

# Largest default: a disk is no faster with more workers, and each takes memory.
_MOST_WORKERS = 4
# --model-type-hf of MindSpeed-LLM -> possible families; v1 calls all Llama-like models llama2.
MODEL_TYPES = {
    "llama2": ("llama", "qwen2"),
    "llama3": ("llama",),
    "qwen25": ("qwen2",),
    "qwen3": ("qwen3",),
    "qwen3-moe": ("qwen3_moe",),
    "deepseek3": ("deepseek_v3",),
}
# Other flags of convert_ckpt.py (MindSpeed-LLM up to 26.1) and convert_ckpt_v2.py, in the notation
# of compat/foreign_flags.toml: NAME is a flag with one value, NAME:0 a switch, NAME:* a list.
_FOREIGN = read_flags('''
[accepted]
"config.json or the files say it, or it tunes the inside of those tools" = """
    use-mcore-models:0 model-type tokenizer-model spec:* add-qkv-bias:0 save-layer-by-layer:0
    ckpt-cfg-path max-queue-size no-checking:0 trust-remote-code:0 loader saver megatron-path
    hidden-size true-vocab-size source-tensor-parallel-size source-pipeline-parallel-size
    source-expert-parallel-size load-hf-from-config:0 vocab-file ai-framework"""
[refused]
"4-bit weights are not written; leave the flag out" = "qlora-nf4:0"
"merge the adapter with MindSpeed-LLM's tool first" = """
    lora-load lora-r lora-alpha lora-target-modules:* save-lora-to-hf:0"""
"reward models keep their Hugging Face checkpoint" = "orm:0"
"a conversion leaves nothing out; leave the flag out" = "load-checkpoint-loosely:0"
"dualpipev places layers unlike any layout here; use --num-layers-per-virtual-pipeline-stage" = """
    schedules-method"""
"models before megatron-core are not written; leave the flag out" = "save-to-legacy:0"
"no supported family has such a part; leave the flag out" = """
    add-dense-bias:0 add-output-layer-bias:0 w-pack post-norm:0"""
''')
_USAGE = "convert_checkpoint.py --load-dir DIR --save-dir DIR [flags]"
_EPILOG = """\
Command lines of MindSpeed-LLM's convert_ckpt.py and convert_ckpt_v2.py work.
Accepted without effect:
{silent}

A killed conversion continues when the same command is given again. --save-dir
appears when everything is on disk, never before.
"""


_MODEL_TYPES = tuple(dict.fromkeys(format.model_type for format in FORMATS))
# Name and description of the formats of a Megatron target.
_TARGETS = {format.name: format.help for format in FORMATS if format.model_type == "mg"}


@dataclass(frozen=True, slots=True)
class CheckpointFlags:
    """The checkpoints that a conversion reads and writes, and their formats."""

    load_model_type: str = flag("hf", "Hugging Face or Megatron.", choices=_MODEL_TYPES)
    save_model_type: str = flag("mg", "Hugging Face or Megatron.", choices=_MODEL_TYPES)
    load_dir: str = flag("", "Directory that is converted; never written to. Required.")
    save_dir: str = flag("", "Directory that is made; must not exist, or be empty. Required.")
    hf_cfg_dir: str = flag(
        "",
        "Directory with config.json and tokenizer of a Megatron source. Without it they are taken "
        "from --save-dir, and the result goes into --save-dir/mg2hf.",
    )
    ckpt_format: str = flag(
        "torch",
        "Format of a Megatron target; sources are recognised. "
        + "; ".join(f"{name}: {help}" for name, help in _TARGETS.items())
        + ".",
        choices=_TARGETS,
    )
    model_type_hf: str = flag("", "Checked against config.json where it is given.")
    num_layers: int | None = flag(None, "Checked against config.json.", minimum=1)
    first_k_dense_replace: int | None = flag(None, "Checked against config.json.", minimum=0)
    mtp_num_layers: int = flag(
        0, "Layers of multi-token prediction to keep: all of them, or 0.", minimum=0
    )
    params_dtype: str = flag(
        "",
        "Element type; without it, that of the source. FP8 blocks become bf16.",
        choices=("", "bf16", "fp16", "fp32"),
    )


@dataclass(frozen=True, slots=True)
class WorkFlags:
    """The resources and checks of a conversion."""

    max_shard_size_gb: float = flag(
        4.0, "Largest file of a Hugging Face target, in 10^9 bytes.", above=0
    )
    workers: int = flag(
        0,
        "Threads; each takes about 100 MB of memory. 0 takes the number of cores, at most "
        f"{_MOST_WORKERS}.",
        minimum=0,
    )
    verify: bool = flag(
        False,
        "Compare every bit of every tensor, source against result, before the result gets its "
        "name.",
    )
    no_progress: bool = flag(False, "No progress bar.")

    @property
    def num_threads(self) -> int:
        """Number of threads: ``--workers``, or what 0 stands for."""
        return self.workers or min(_MOST_WORKERS, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Converts checkpoints between Hugging Face and Megatron, any layout to any layout."""

    checkpoint: CheckpointFlags
    layout: LayoutFlags
    work: WorkFlags


def parse_options(argv: Sequence[str]) -> ConversionOptions:
    """Parse the options of a command line.

    Raises:
        UsageError: Flags that are unknown, malformed or not supported.
        SystemExit: ``--help`` was asked for.
    """
    silent = [f.name for f in _FOREIGN.values() if f.disposition is Disposition.ACCEPTED]
    listed = textwrap.fill(" ".join(silent), 78, break_on_hyphens=False)
    epilog = _EPILOG.format(silent=listed)
    parser = build_parser(ConversionOptions, "convert_checkpoint.py", _USAGE, epilog)
    sections, _ = parse_sections(ConversionOptions, argv, parser, _FOREIGN)
    return ConversionOptions(**sections)
