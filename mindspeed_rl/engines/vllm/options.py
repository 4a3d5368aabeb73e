"""Checks which options of vLLM users may give.

The checks of a command line import this module, so it imports neither vLLM nor torch.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mindspeed_rl.config.engine_options import as_flag
from mindspeed_rl.core.errors import UsageError

RESERVED: Mapping[str, str] = {
    "use --hf-checkpoint": "model model_weights hf_config_path hf_overrides revision "
    "code_revision model_class_overrides config_format",
    "use --trust-remote-code": "trust_remote_code",
    "use --tokenizer-name-or-path": "tokenizer tokenizer_mode tokenizer_revision",
    "the engine reads and writes token ids": "skip_tokenizer_init chat_template "
    "enable_prompt_embeds",
    "the engine generates": "runner convert pooler_config",
    "use --rollout-dtype": "dtype",
    "use --max-prompt-length and --rollout-max-response-length": "max_model_len",
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
    "vLLM on CPU turns it off, and on a device a step that is begun ahead would end in the next "
    "rollout": "async_scheduling",
    "its log-probs would not be those of the trainer's weights": "quantization "
    "quantization_config allow_deprecated_quantization kv_cache_dtype "
    "kv_cache_dtype_skip_layers",
    "--vllm-speculative-config has all of it in one object": "spec_*",
    "only the policy itself samples": "diffusion_config",
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
"""Reason or what to use instead -> names of options that users may not give.

A name that ends with ``*`` stands for all names with this prefix.
"""


def reserved_for(name: str) -> str:
    """Return why an option of ``vllm.LLM`` is not available; empty when it is."""
    for reason, patterns in RESERVED.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return reason
    return ""


# The plain types of Python that a value of JSON can have, by the spelling of an annotation.
_PLAIN: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("true or false", (bool,)),
    "str": ("a text", (str,)),
    "None": ("null", (type(None),)),
}


def check_option_types(options: Mapping[str, object]) -> None:
    """Refuse values of options that are not of the type that the installed vLLM declares. Local.

    The declarations are read from its source, because importing it takes seconds. Options that are
    no numbers, switches or texts are left to vLLM.

    Raises:
        UsageError: A value has another type; names the option, the value and what is allowed.
    """
    declared = _declared_types() if options else {}
    for name, value in options.items():
        kinds = declared.get(name, "").split(" | ")
        if not all(kind in _PLAIN for kind in kinds):
            continue
        allowed = [kind for _, types in map(_PLAIN.__getitem__, kinds) for kind in types]
        if type(value) not in allowed:
            wanted = " or ".join(_PLAIN[kind][0] for kind in kinds)
            raise UsageError(f"{as_flag(name)} {value}: must be {wanted}; correct the value")


@cache
def _declared_types() -> Mapping[str, str]:
    """Return the annotations of vLLM's ``EngineArgs`` by option; none where vLLM is not there."""
    spec = find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        source = Path(folder, "engine", "arg_utils.py")
        if source.is_file():
            return dict(_fields(ast.parse(source.read_bytes())))
    return {}


def _fields(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id, ast.unparse(field.annotation)


def check_option_names(options: Mapping[str, object]) -> None:
    """Refuse ``--vllm-*`` options that the installed vLLM lacks. Imports vLLM if there are any.

    Raises:
        UsageError: vLLM has no such option; names it and the nearest ones.
    """
    if not options:
        return
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, [n for n in known if not reserved_for(n)], n=3)
            hint = ", ".join(as_flag(other) for other in near)
            raise UsageError(
                f"{as_flag(name)}: vLLM has no such option; "
                + (f"nearest: {hint}" if near else "none is near; see the arguments of vllm.LLM")
            )
