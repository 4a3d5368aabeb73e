"""Directories of models that draft: of a dense model, and of heads of EAGLE."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LENGTH = 4  # tokens of a draft


def speculation(method: str, folder: Path) -> list[str]:
    """Flags of drafts that come from a model."""
    drafts = {"method": method, "model": str(folder), "num_speculative_tokens": LENGTH}
    return ["--vllm-speculative-config", json.dumps(drafts)]


def write_draft_model(
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    tokens: Mapping[str, int] | None = None,
) -> Path:
    """Write a model of one layer whose sizes all differ, of zeros, with few of its tensors.

    Args:
        folder: Where to write it.
        changes: Of its config.json; ``None`` as a value takes a key away.
        dtype: Type of its weights.
        tokens: Vocabulary of a tokenizer.json; without it there is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 48,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "num_hidden_layers": 3, "vocab_size": 307,
    } | dict(changes or {})  # fmt: skip
    config = {key: value for key, value in config.items() if value is not None}
    tensors = {
        "model.embed_tokens.weight": torch.zeros(307, 48, dtype=dtype),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(96, 48, dtype=dtype),
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(96, dtype=dtype),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    if tokens is not None:
        vocabulary = {"model": {"vocab": dict(tokens)}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    return folder


def write_eagle_head(folder: Path, method: str, *, hidden: int = 64, vocab: int = 307) -> Path:
    """Write a random head of EAGLE or, with a vocabulary of its own, of EAGLE-3.

    Names and shapes are those that vLLM loads (``llama_eagle.py``, ``llama_eagle3.py``): a head
    without embeddings takes the policy's, and one of EAGLE without ``lm_head`` that, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    noise = torch.Generator().manual_seed(9)

    def drawn(*shape: int) -> torch.Tensor:
        return 0.05 * torch.randn(*shape, generator=noise)

    third = method == "eagle3"
    layer, wide, head, ffn = "midlayer." if third else "layers.0.", hidden * (1 + third), 32, 128
    tensors = {
        f"{layer}self_attn.q_proj.weight": drawn(2 * head, wide),
        f"{layer}self_attn.k_proj.weight": drawn(head, wide),
        f"{layer}self_attn.v_proj.weight": drawn(head, wide),
        f"{layer}self_attn.o_proj.weight": drawn(hidden, 2 * head),
        f"{layer}mlp.gate_proj.weight": drawn(ffn, hidden),
        f"{layer}mlp.up_proj.weight": drawn(ffn, hidden),
        f"{layer}mlp.down_proj.weight": drawn(hidden, ffn),
        f"{layer}post_attention_layernorm.weight": 1 + drawn(hidden),
        "fc.weight": drawn(hidden, hidden * (3 if third else 2)),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": head,
        "num_hidden_layers": 1, "vocab_size": vocab, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    if third:
        few = torch.arange(100)
        known = torch.zeros(vocab, dtype=torch.bool)
        known[3 * few] = True
        tensors |= {
            "norm.weight": 1 + drawn(hidden),
            f"{layer}hidden_norm.weight": 1 + drawn(hidden),
            f"{layer}input_layernorm.weight": 1 + drawn(hidden),
            "lm_head.weight": drawn(len(few), hidden),
            "d2t": 2 * few,  # what is added to an id of the head
            "t2d": known,
        }
        # A model of two layers lacks the three that are vLLM's default.
        config |= {"draft_vocab_size": len(few), "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
