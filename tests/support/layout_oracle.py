"""What every rank must hold, by slicing and concatenating whole arrays.

Written from megatron-core's and vLLM's own weight layouts and sharing no code with the planner:
an array of every HF tensor goes in, the parameters of one rank come out. Shapes: h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int32]
PADDING = -1


@dataclass(frozen=True)
class Case:
    """A tiny Qwen2-like model with a training grid and an engine size."""

    num_layers: int
    hidden: int
    ffn: int
    kv_heads: int
    heads_per_group: int
    head_dim: int
    vocab: int
    tied: bool
    tp: int
    pp: int
    cp: int
    dp: int
    vocab_divisor: int
    engine_tp: int
    ranks_per_node: int

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.heads_per_group


def hf_arrays(case: Case) -> dict[str, Array]:
    """Every HF tensor; each element of the model has a number of its own."""
    q, kv, h, ffn = case.heads * case.head_dim, case.kv_heads * case.head_dim, case.hidden, case.ffn
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (case.vocab, h)}
    for layer in range(case.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (h,),
            prefix + "self_attn.q_proj.weight": (q, h),
            prefix + "self_attn.k_proj.weight": (kv, h),
            prefix + "self_attn.v_proj.weight": (kv, h),
            prefix + "self_attn.q_proj.bias": (q,),
            prefix + "self_attn.k_proj.bias": (kv,),
            prefix + "self_attn.v_proj.bias": (kv,),
            prefix + "self_attn.o_proj.weight": (h, q),
            prefix + "post_attention_layernorm.weight": (h,),
            prefix + "mlp.gate_proj.weight": (ffn, h),
            prefix + "mlp.up_proj.weight": (ffn, h),
            prefix + "mlp.down_proj.weight": (h, ffn),
        }
    shapes["model.norm.weight"] = (h,)
    if not case.tied:
        shapes["lm_head.weight"] = (case.vocab, h)
    arrays, start = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        arrays[name] = np.arange(start, start + size, dtype=np.int32).reshape(shape)
        start += size
    return arrays


def _padded(array: Array, multiple: int) -> Array:
    return np.pad(array, ((0, -len(array) % multiple), (0, 0)), constant_values=PADDING)


def megatron_params(case: Case, hf: dict[str, Array], rank: int) -> dict[str, Array]:
    """The parameters of a megatron-core rank: order of ranks tp, cp, dp, pp (fastest first)."""
    tp_rank, stage = rank % case.tp, rank // (case.tp * case.cp * case.dp)

    def share(array: Array, axis: int = 0) -> Array:
        return np.split(array, case.tp, axis=axis)[tp_rank]

    def qkv(prefix: str, kind: str) -> Array:
        parts = [hf[f"{prefix}self_attn.{p}_proj.{kind}"] for p in "qkv"]
        tail = parts[0].shape[1:]
        groups = [part.reshape(case.kv_heads, -1, *tail) for part in parts]
        return share(np.concatenate(groups, axis=1)).reshape(-1, *tail)

    params: dict[str, Array] = {}
    multiple = case.vocab_divisor * case.tp
    if stage == 0:
        embedding = _padded(hf["model.embed_tokens.weight"], multiple)
        params["embedding.word_embeddings.weight"] = share(embedding)
    per_stage = case.num_layers // case.pp
    for local in range(per_stage):
        theirs, ours = f"model.layers.{stage * per_stage + local}.", f"decoder.layers.{local}."
        gate, up = hf[theirs + "mlp.gate_proj.weight"], hf[theirs + "mlp.up_proj.weight"]
        params |= {
            ours + "input_layernorm.weight": hf[theirs + "input_layernorm.weight"],
            ours + "self_attention.linear_qkv.weight": qkv(theirs, "weight"),
            ours + "self_attention.linear_qkv.bias": qkv(theirs, "bias"),
            ours + "self_attention.linear_proj.weight": share(
                hf[theirs + "self_attn.o_proj.weight"], axis=1
            ),
            ours + "pre_mlp_layernorm.weight": hf[theirs + "post_attention_layernorm.weight"],
            ours + "mlp.linear_fc1.weight": np.concatenate([share(gate), share(up)]),
            ours + "mlp.linear_fc2.weight": share(hf[theirs + "mlp.down_proj.weight"], axis=1),
        }
    if stage == case.pp - 1:
        params["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not case.tied or case.pp > 1:
            head = hf["model.embed_tokens.weight" if case.tied else "lm_head.weight"]
            params["output_layer.weight"] = share(_padded(head, multiple))
    return params


def vllm_params(case: Case, hf: dict[str, Array], rank: int) -> dict[str, Array]:
    """The parameters of a vLLM rank: engines are runs of neighbouring ranks."""
    size, index = case.engine_tp, rank % case.engine_tp

    def share(array: Array, axis: int = 0) -> Array:
        return np.split(array, size, axis=axis)[index]

    def kv_share(array: Array) -> Array:
        heads = np.stack(np.split(array, case.kv_heads))
        copies = np.repeat(heads, max(1, size // case.kv_heads), axis=0)
        return np.concatenate(list(np.split(copies, size)[index]))

    def qkv(prefix: str, kind: str) -> Array:
        q, k, v = (hf[f"{prefix}self_attn.{p}_proj.{kind}"] for p in "qkv")
        return np.concatenate([share(q), kv_share(k), kv_share(v)])

    params = {"model.embed_tokens.weight": share(_padded(hf["model.embed_tokens.weight"], 64))}
    for layer in range(case.num_layers):
        name = f"model.layers.{layer}."
        gate, up = hf[name + "mlp.gate_proj.weight"], hf[name + "mlp.up_proj.weight"]
        params |= {
            name + "input_layernorm.weight": hf[name + "input_layernorm.weight"],
            name + "self_attn.qkv_proj.weight": qkv(name, "weight"),
            name + "self_attn.qkv_proj.bias": qkv(name, "bias"),
            name + "self_attn.o_proj.weight": share(hf[name + "self_attn.o_proj.weight"], axis=1),
            name + "post_attention_layernorm.weight": hf[name + "post_attention_layernorm.weight"],
            name + "mlp.gate_up_proj.weight": np.concatenate([share(gate), share(up)]),
            name + "mlp.down_proj.weight": share(hf[name + "mlp.down_proj.weight"], axis=1),
        }
    params["model.norm.weight"] = hf["model.norm.weight"]
    if not case.tied:
        params["lm_head.weight"] = share(_padded(hf["lm_head.weight"], 64))
    return params
