"""What every rank must hold, by slicing and concatenating whole arrays.

Written from megatron-core's and vLLM's own weight layouts and sharing no code with the planner:
an array of every HF tensor goes in, the parameters of one rank come out.
"""

from __future__ import annotations

import numpy as np
from support.layout_arrays import Array, Case, Cut, Layer, chunks_of, padded

# --- megatron-core -----------------------------------------------------------------------------


def _megatron_attention(case: Case, layer: Layer, share: Cut) -> dict[str, Array]:
    def attention(name: str) -> Array:
        return layer[f"self_attn.{name}"]

    if case.latent:
        params = {
            "linear_kv_down_proj.weight": attention("kv_a_proj_with_mqa.weight"),
            "kv_layernorm.weight": attention("kv_a_layernorm.weight"),
            "linear_kv_up_proj.weight": share(attention("kv_b_proj.weight")),
            "linear_proj.weight": share(attention("o_proj.weight"), 1),
        }
        if not case.latent.q_lora:
            return params | {"linear_q_proj.weight": share(attention("q_proj.weight"))}
        return params | {
            "linear_q_down_proj.weight": attention("q_a_proj.weight"),
            "q_layernorm.weight": attention("q_a_layernorm.weight"),
            "linear_q_up_proj.weight": share(attention("q_b_proj.weight")),
        }

    def qkv(kind: str) -> Array:
        parts = [attention(f"{p}_proj.{kind}") for p in "qkv"]
        tail = parts[0].shape[1:]
        groups = [part.reshape(case.kv_heads, -1, *tail) for part in parts]
        return share(np.concatenate(groups, axis=1).reshape(-1, *tail))

    params = {
        "linear_qkv.weight": qkv("weight"),
        "linear_proj.weight": share(attention("o_proj.weight"), 1),
    }
    if case.qkv_bias:
        params["linear_qkv.bias"] = qkv("bias")
    if case.qk_norm:
        params |= {f"{p}_layernorm.weight": attention(f"{p}_norm.weight") for p in "qk"}
    return params


def _megatron_mlp(layer: Layer, prefix: str, share: Cut) -> dict[str, Array]:
    gate, up = layer[prefix + "gate_proj.weight"], layer[prefix + "up_proj.weight"]
    return {
        "linear_fc1.weight": np.concatenate([share(gate), share(up)]),
        "linear_fc2.weight": share(layer[prefix + "down_proj.weight"], 1),
    }


def _megatron_experts(case: Case, layer: Layer, rank: int) -> dict[str, Array]:
    params = {"router.weight": layer["mlp.gate.weight"]}
    if case.router_bias:
        params["router.expert_bias"] = layer["mlp.gate.e_score_correction_bias"]
    # expert tensor parallelism innermost, then expert parallelism
    etp = case.etp or case.tp
    share, mine = Cut(rank % etp, etp), Cut(rank // etp % case.ep, case.ep)
    for local, expert in enumerate(mine(np.arange(case.experts, dtype=np.int32)).tolist()):
        matrices = _megatron_mlp(layer, f"mlp.experts.{expert}.", share)
        params |= {f"experts.local_experts.{local}.{n}": array for n, array in matrices.items()}
    if case.shared_ffn:
        shared = _megatron_mlp(layer, "mlp.shared_experts.", Cut(rank % case.tp, case.tp))
        params |= {f"shared_experts.{name}": array for name, array in shared.items()}
    return params


def megatron_params(case: Case, hf: dict[str, Array], rank: int) -> dict[str, Array]:
    """The parameters of a training rank: tensor parallelism innermost, pipeline outermost."""
    share, stage = Cut(rank % case.tp, case.tp), rank // (case.world // case.pp)
    multiple = case.vocab_divisor * case.tp
    params: dict[str, Array] = {}
    for number, layers in enumerate(chunks := chunks_of(case)):
        if number % case.pp != stage:
            continue
        here = f"chunk{number // case.pp}." if case.vpp > 1 else ""
        if number == 0:
            embedding = share(padded(hf["model.embed_tokens.weight"], multiple))
            params[here + "embedding.word_embeddings.weight"] = embedding
        for local, number_in_model in enumerate(layers):
            layer = Layer(hf, f"model.layers.{number_in_model}.")
            ours = f"{here}decoder.layers.{local}."
            if case.has_experts(number_in_model):
                mlp = _megatron_experts(case, layer, rank)
            else:
                mlp = _megatron_mlp(layer, "mlp.", share)
            attention = _megatron_attention(case, layer, share)
            params |= {
                ours + "input_layernorm.weight": layer["input_layernorm.weight"],
                ours + "pre_mlp_layernorm.weight": layer["post_attention_layernorm.weight"],
                **{f"{ours}self_attention.{name}": array for name, array in attention.items()},
                **{f"{ours}mlp.{name}": array for name, array in mlp.items()},
            }
        if number == len(chunks) - 1:
            params[here + "decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            if not case.tied or case.pp > 1:
                head = hf["model.embed_tokens.weight" if case.tied else "lm_head.weight"]
                params[here + "output_layer.weight"] = share(padded(head, multiple))
    return params


# --- vLLM --------------------------------------------------------------------------------------


def _vllm_attention(case: Case, layer: Layer, share: Cut) -> dict[str, Array]:
    def attention(name: str) -> Array:
        return layer[f"self_attn.{name}"]

    if case.latent:
        down, query = attention("kv_a_proj_with_mqa.weight"), {}
        if case.latent.q_lora:
            joint = np.concatenate([attention("q_a_proj.weight"), down])
            query = {
                "fused_qkv_a_proj.weight": joint,
                "q_a_layernorm.weight": attention("q_a_layernorm.weight"),
                "q_b_proj.weight": share(attention("q_b_proj.weight")),
            }
        else:
            query = {
                "kv_a_proj_with_mqa.weight": down,
                "q_proj.weight": share(attention("q_proj.weight")),
            }
        return query | {
            "kv_a_layernorm.weight": attention("kv_a_layernorm.weight"),
            "kv_b_proj.weight": share(attention("kv_b_proj.weight")),
            "o_proj.weight": share(attention("o_proj.weight"), 1),
        }

    def kv_share(array: Array) -> Array:
        heads = np.stack(np.split(array, case.kv_heads))
        copies = np.repeat(heads, max(1, share.count // case.kv_heads), axis=0)
        return np.concatenate(list(share(copies)))

    def qkv(kind: str) -> Array:
        q, k, v = (attention(f"{p}_proj.{kind}") for p in "qkv")
        return np.concatenate([share(q), kv_share(k), kv_share(v)])

    params = {
        "qkv_proj.weight": qkv("weight"),
        "o_proj.weight": share(attention("o_proj.weight"), 1),
    }
    if case.qkv_bias:
        params["qkv_proj.bias"] = qkv("bias")
    if case.qk_norm:
        params |= {f"{p}_norm.weight": attention(f"{p}_norm.weight") for p in "qk"}
    return params


def _vllm_mlp(layer: Layer, prefix: str, share: Cut) -> dict[str, Array]:
    gate, up = layer[prefix + "gate_proj.weight"], layer[prefix + "up_proj.weight"]
    return {
        "gate_up_proj.weight": np.concatenate([share(gate), share(up)]),
        "down_proj.weight": share(layer[prefix + "down_proj.weight"], 1),
    }


def _vllm_experts(case: Case, number: int, layer: Layer, rank: int) -> dict[str, Array]:
    """Experts over all ranks of the engine: whole ones, or slices of all of them, padded."""
    params = {"gate.weight": layer["mlp.gate.weight"]}
    if case.router_bias:
        params["gate.e_score_correction_bias"] = layer["mlp.gate.e_score_correction_bias"]
    size = case.engine_tp * case.engine_dp
    mine = Cut(rank % size, size)
    slots = dict(case.layer_experts).get(number, case.physical_experts)
    experts = np.array(slots or range(case.experts), dtype=np.int32)
    share = Cut(0, 1) if case.engine_ep else mine
    w13, w2 = [], []
    for expert in (mine(experts) if case.engine_ep else experts).tolist():
        gate, up, down = (
            layer[f"mlp.experts.{expert}.{p}_proj.weight"] for p in ("gate", "up", "down")
        )
        halves = [padded(share(half), case.expert_multiple) for half in (gate, up)]
        w13.append(np.concatenate(halves))
        w2.append(padded(share(down, 1), case.expert_multiple, axis=1))
    for name, stack in (("w13_weight", np.stack(w13)), ("w2_weight", np.stack(w2))):
        stored = np.ascontiguousarray(stack.transpose(0, 2, 1)) if case.transposed else stack
        params[f"experts.routed_experts.{name}"] = stored
    if case.shared_ffn:
        spread = case.engine_ep and case.engine_tp > 1 and case.engine_dp > 1
        whole = case.flashcomm or (case.whole_shared and spread)
        count = 1 if whole else case.engine_tp
        shared = _vllm_mlp(layer, "mlp.shared_experts.", Cut(rank % count, count))
        params |= {f"shared_experts.{name}": array for name, array in shared.items()}
    return params


def vllm_params(case: Case, hf: dict[str, Array], rank: int) -> dict[str, Array]:
    """The parameters of a vLLM rank: engines are runs of neighbouring ranks."""
    share = Cut(rank % case.engine_tp, case.engine_tp)
    params = {"model.embed_tokens.weight": share(padded(hf["model.embed_tokens.weight"], 64))}
    for number in range(case.num_layers):
        name = f"model.layers.{number}."
        layer = Layer(hf, name)
        if case.has_experts(number):
            mlp = _vllm_experts(case, number, layer, rank)
        else:
            mlp = _vllm_mlp(layer, "mlp.", share)
        attention = _vllm_attention(case, layer, share)
        params |= {
            name + "input_layernorm.weight": layer["input_layernorm.weight"],
            name + "post_attention_layernorm.weight": layer["post_attention_layernorm.weight"],
            **{f"{name}self_attn.{n}": array for n, array in attention.items()},
            **{f"{name}mlp.{n}": array for n, array in mlp.items()},
        }
    params["model.norm.weight"] = hf["model.norm.weight"]
    if not case.tied:
        params["lm_head.weight"] = share(padded(hf["lm_head.weight"], 64))
    return params
