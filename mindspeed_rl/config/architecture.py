"""Configs of the models of a run, and the check of a script's architecture flags against them."""

from __future__ import annotations

from typing import Any

from mindspeed_rl.config import ModelConfig
from mindspeed_rl.config.layouts import layer_numbers
from mindspeed_rl.core.errors import UsageError, refuse
from mindspeed_rl.core.layout import round_up
from mindspeed_rl.models.layers import LatentAttention
from mindspeed_rl.models.spec import ModelSpec, read_hf_config


def model_config(checkpoint: str, flag: str, *, files: bool) -> dict[str, Any]:
    """Read the ``config.json`` of the checkpoint that ``flag`` names.

    Without ``files`` only the architecture counts: the path may be the file itself, and a quantised
    checkpoint (the published DeepSeek) is read like its bfloat16 form.
    """
    if not checkpoint:
        raise UsageError(f"{flag} is required: give a Hugging Face model directory")
    config = read_hf_config(checkpoint, or_file=not files, flag=flag)
    return config if files else {k: v for k, v in config.items() if k != "quantization_config"}


def check_architecture(model: ModelConfig, spec: ModelSpec, tp: int) -> None:
    """Compare the architecture flags of a script with the model.

    Raises:
        UsageError: Flags contradict the model; the message names each, its value and the model's.
    """
    num_noop = len(layer_numbers("--noop-layers", model.noop_layers))
    num_layers = None if model.num_layers is None else model.num_layers - num_noop
    num_layers_flag = "--num-layers less --noop-layers =" if num_noop else "--num-layers"
    padded = round_up(spec.vocab_size, model.make_vocab_size_divisible_by * tp)
    pairs = [
        (num_layers_flag, num_layers, spec.num_layers),
        ("--hidden-size", model.hidden_size, spec.hidden_size),
        ("--ffn-hidden-size", model.ffn_hidden_size, spec.ffn_hidden_size),
        ("--vocab-size", model.vocab_size, spec.vocab_size),
        ("--padded-vocab-size", model.padded_vocab_size, padded),
        ("--rotary-base", model.rotary_base, spec.rope.theta),
        ("--norm-epsilon", model.norm_epsilon, spec.norm_eps),
        (
            "--untie-embeddings-and-output-weights",
            True if model.untie_embeddings_and_output_weights else None,
            not spec.tie_embeddings,
        ),
    ]
    for attention in spec.attentions:
        # megatron-core does not read --kv-channels with latent attention.
        channels = None if isinstance(attention, LatentAttention) else model.kv_channels
        pairs += [
            ("--num-attention-heads", model.num_attention_heads, attention.num_heads),
            ("--num-query-groups", model.num_query_groups, attention.num_kv_heads),
            ("--kv-channels", channels, attention.head_dim),
            ("--add-qkv-bias", True if model.add_qkv_bias else None, attention.qkv_bias),
        ]
    refuse(
        f"{name} {given} but the model has {real}; remove the flag, or give another model than "
        f"--hf-checkpoint {model.hf_checkpoint}"
        for name, given, real in pairs
        if given is not None and given != real
    )


def positions_note(model: ModelConfig, spec: ModelSpec) -> list[str]:
    """Return a note where a script says that the model has more positions than it has. Pure."""
    given, real = model.max_position_embeddings, spec.max_position_embeddings
    if given is None or given <= real:
        return []
    return [
        f"note: --max-position-embeddings {given}: the config.json of the model says {real}, and "
        "that is the limit"
    ]
