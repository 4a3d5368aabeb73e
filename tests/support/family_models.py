"""Tiny random checkpoints of every family and variant, and what transformers says about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from mindspeed_rl.core.types import TrainSample

VOCAB = 67
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "expert_ffn": 16}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}


@dataclass(frozen=True, slots=True)
class FamilyCase:
    """A variant of a family.

    Attributes:
        name: of the variant.
        family: the tiny family, or transformers' model type where there is none.
        changes: config keys that differ from the common ones.
        experts: whether it has experts.
    """

    name: str
    family: str
    changes: Mapping[str, Any]
    experts: bool = False


FAMILY_CASES = {
    case.name: case
    for case in (
        FamilyCase("qwen2-tied", "qwen2", {"tie_word_embeddings": True}),
        FamilyCase("qwen3", "qwen3", {"head_dim": 12}),
        FamilyCase(
            "llama-one-kv-head",
            "llama",
            {
                "num_key_value_heads": 1,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10_000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
        ),
        FamilyCase("llama-yarn", "llama", {"rope_parameters": _YARN}),
        FamilyCase("qwen3-moe", "qwen3_moe", _EXPERTS | {"mlp_only_layers": [1]}, experts=True),
        FamilyCase(
            "qwen3-moe-raw-weights", "qwen3_moe", _EXPERTS | {"norm_topk_prob": False}, experts=True
        ),
        FamilyCase("deepseek", "deepseek_v3", _EXPERTS | _LATENT, experts=True),
        FamilyCase(
            "deepseek-plain",
            "deepseek_v3",
            _EXPERTS
            | _LATENT
            | {
                "q_lora_rank": None,
                "n_group": 1,
                "topk_group": 1,
                "n_shared_experts": 2,
                "first_k_dense_replace": 2,
                "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
            },
            experts=True,
        ),
    )
}


def family_config(case: FamilyCase) -> PretrainedConfig:
    """The config of transformers."""
    import make_tiny_model
    from transformers import AutoConfig

    fields = {**_COMMON, **case.changes}
    if case.family in make_tiny_model.FAMILIES:
        return make_tiny_model.family_config(case.family, **fields)
    return AutoConfig.for_model(case.family, **fields)


def write_family_model(case: FamilyCase, folder: Path, seed: int = 0) -> Path:
    """A checkpoint with weights of N(0, 0.1), so that every part of the model matters."""
    from transformers import AutoModelForCausalLM

    config = family_config(case)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(torch.float32)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.uniform_(0.5, 1.5) if "norm" in name else param.normal_(0.0, 0.1)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class FamilyReference:
    """log-probs and entropies per sample, and the gradient of the mean log-likelihood."""

    logprobs: list[torch.Tensor]
    entropies: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]

    @property
    def loss(self) -> float:
        """Token-mean negative log-likelihood of all samples."""
        return -float(torch.cat(self.logprobs).mean())


def family_reference(
    folder: Path, samples: Sequence[TrainSample], temperature: float = 1.0
) -> FamilyReference:
    """transformers on each sample alone, unpadded; gradients in fp64, by checkpoint names."""
    from transformers import AutoModelForCausalLM

    # the grouped kernel of experts has no fp64
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    logprobs, entropies = [], []
    for sample in samples:
        logits = model(sample.token_ids[None]).logits[0][sample.num_prompt_tokens - 1 : -1]
        row = (logits / temperature).log_softmax(-1)
        response = sample.token_ids[sample.num_prompt_tokens :, None]
        logprobs.append(row.gather(-1, response)[:, 0])
        entropies.append(-(row.exp() * row).sum(-1).detach().float())
    (-torch.cat(logprobs).mean()).backward()
    gradients: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        gradients |= _checkpoint_names(name, param.grad)
    return FamilyReference([p.detach().float() for p in logprobs], entropies, gradients)


def _checkpoint_names(name: str, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """transformers stacks experts in memory and writes them one by one."""
    prefix, _, tail = name.partition("mlp.experts.")
    if not tail:
        return {name: gradient}
    found = {}
    for expert, matrix in enumerate(gradient):
        stem = f"{prefix}mlp.experts.{expert}."
        if tail == "down_proj":
            found[f"{stem}down_proj.weight"] = matrix
        else:
            gate, up = matrix.chunk(2)
            found[f"{stem}gate_proj.weight"] = gate
            found[f"{stem}up_proj.weight"] = up
    return found
