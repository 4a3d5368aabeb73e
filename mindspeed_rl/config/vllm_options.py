"""Engine options on the command line: ``--vllm-max-num-seqs 512``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

from mindspeed_rl.core.errors import UsageError

PREFIX = "--vllm-"

RESERVED: Mapping[str, str] = MappingProxyType(
    {
        "use --hf-checkpoint": "model model_weights hf_config_path hf_overrides revision "
        "code_revision model_class_overrides config_format",
        "use --tokenizer-name-or-path": "tokenizer tokenizer_mode tokenizer_revision",
        "the engine reads and writes token ids": "skip_tokenizer_init chat_template "
        "enable_prompt_embeds",
        "the engine generates": "runner convert pooler_config",
        "use --rollout-dtype": "dtype",
        "use --seq-length": "max_model_len",
        "use --rollout-kv-cache-gb": "kv_cache_memory_bytes gpu_memory_utilization "
        "num_gpu_blocks_override",
        "use --seed": "seed",
        "use --rollout-tp": "tensor_parallel_size",
        "use --rollout-ep": "enable_expert_parallel",
        "use --rollout-dp": "data_parallel_size",
        "an engine is one pipeline stage of --rollout-tp x --rollout-dp ranks, and engines share "
        "the prompts as replicas": "pipeline_parallel_size data_parallel_* "
        "prefill_context_parallel_size decode_context_parallel_size enable_elastic_ep "
        "elastic_ep_max_dp_size",
        "the layout of the weights knows no such placement of experts": "enable_eplb "
        "eplb_config expert_placement_strategy enable_ep_weight_filter",
        "engines run in the training processes, which torchrun starts": "worker_cls "
        "worker_extension_cls distributed_executor_backend nnodes node_rank master_addr "
        "master_port device_ids",
        "a step that is begun ahead would end in the next rollout": "async_scheduling",
        "its log-probs would not be those of the trainer's weights": "quantization "
        "quantization_config allow_deprecated_quantization kv_cache_dtype "
        "kv_cache_dtype_skip_layers",
        "only the policy itself samples": "speculative_config spec_* diffusion_config",
        "adapters are no weights of the policy": "enable_lora max_loras max_lora_* max_cpu_loras "
        "default_mm_loras fully_sharded_loras lora_dtype lora_target_modules "
        "enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format "
        "enable_moe_shared_loras",
        "sampling follows the --rl-default-* flags": "generation_config "
        "override_generation_config logits_processors",
        "the trainer compares log-probs after temperature": "logprobs_mode",
        "weights come from the trainer, which writes them in place": "load_format "
        "model_loader_extra_config weight_transfer_config model_impl cpu_offload_* offload_*",
        "memory is given back between the phases already": "enable_sleep_mode "
        "sleep_mode_offload_cudagraph sleep_preserve_parameter_names",
    }
)
"""Reason or what to use instead -> options that the engine wrapper sets or cannot honour.

An option that ends with ``*`` stands for all that begin like it.
"""


def reserved_for(name: str) -> str:
    """Why an option of ``vllm.LLM`` is not available; empty: it is."""
    for reason, patterns in RESERVED.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return reason
    return ""


def as_flag(name: str) -> str:
    """An option of ``vllm.LLM`` as it is typed."""
    return PREFIX + name.replace("_", "-")


def take_vllm_options(argv: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """Split the engine options off a command line.

    Values are read as JSON, else kept as text; an option without a value is True. Of an option
    that is given twice the last value counts. Names may have hyphens or underscores.

    Returns:
        The other tokens in order, and the options by the names of ``vllm.LLM``.

    Raises:
        UsageError: a reserved option, a prefix without a name, or several values. Whether vLLM has
            the option is looked up before the engine is built, because that imports vLLM.
    """
    rest: list[str] = []
    options: dict[str, object] = {}
    position = 0
    while position < len(argv):
        token = argv[position]
        position += 1
        typed, equals, attached = token.partition("=")
        spelled = typed.replace("_", "-")
        if not spelled.startswith(PREFIX):
            rest.append(token)
            continue
        values = [attached] if equals else []
        while position < len(argv) and not argv[position].startswith("--"):
            values.append(argv[position])
            position += 1
        name = _option_name(spelled)
        if len(values) > 1:
            raise UsageError(
                f"{spelled} takes one value, got {len(values)}: {' '.join(values)}; write a list "
                f"as JSON in quotes, like {spelled} '[1, 2]', or remove the others"
            )
        options[name] = _read(values[0]) if values else True
    return rest, options


def _option_name(spelled: str) -> str:
    name = spelled.removeprefix(PREFIX).replace("-", "_")
    if not name:
        raise UsageError(f"{PREFIX}: must be followed by the name of an engine option")
    if reason := reserved_for(name):
        raise UsageError(f"{spelled} is not available: {reason}; remove this flag")
    return name


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
