"""Layout-invariant checksums: equal for equal bits in any layout, different for any fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.layout_arrays import PADDING, Array, Case, hf_arrays
from support.layout_cases import GQA, LATENT, MOE, TIED, cases, layouts_of
from support.layout_oracle import megatron_params, vllm_params

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.weights.verify import WeightVerifier, box_checksum, copies_held

Params = dict[str, torch.Tensor]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def as_weights(params: dict[str, Array], dtype: torch.dtype) -> Params:
    """Element numbers as weights of distinct bits; padding is garbage that must not count."""

    def weight(array: Array) -> torch.Tensor:
        ids = torch.from_numpy(array.copy())
        bits = torch.where(ids == PADDING, 0x3F12, ids % 16000 + 0x3000)
        return bits.to(BITS[dtype]).view(dtype)

    return {name: weight(array) for name, array in params.items()}


def engine_weights(case: Case, dtype: torch.dtype) -> list[Params]:
    hf = hf_arrays(case)
    return [as_weights(vllm_params(case, hf, rank), dtype) for rank in range(case.world)]


def checksums(case: Case, weights: list[Params], dtype: torch.dtype) -> torch.Tensor:
    """Of the trainer and of an engine with ``weights``, with the all-reduce done by hand."""
    source, target = layouts_of(case)
    hf = hf_arrays(case)
    shares = []
    for rank in range(case.world):
        read = as_weights(megatron_params(case, hf, rank), dtype)
        shares.append(WeightVerifier(source, target, rank, dtype).checksums(read, weights[rank]))
    return torch.stack(shares).sum(0)


def engine_differs(case: Case, weights: list[Params], dtype: torch.dtype) -> list[str]:
    """The comparison of ``WeightVerifier``."""
    source, target = layouts_of(case)
    names = list(source.hf_shapes)
    assert set(names) == set(target.hf_shapes)
    read, written = checksums(case, weights, dtype)
    wrong = read * copies_held(target, names) != written
    return [name for name, bad in zip(names, wrong.tolist(), strict=True) if bad]


@given(cases(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=25, deadline=None)
@example(GQA, torch.bfloat16)
@example(TIED, torch.float32)
@example(MOE, torch.bfloat16)
@example(LATENT, torch.bfloat16)
def test_trainer_and_engine_agree_in_any_pair_of_layouts(case: Case, dtype: torch.dtype) -> None:
    assert engine_differs(case, engine_weights(case, dtype), dtype) == []


def flip_lowest_bit(weights: list[Params]) -> None:
    weights[5]["model.layers.2.mlp.down_proj.weight"].view(torch.int16)[1, 1] ^= 1


def flip_sign_everywhere(weights: list[Params]) -> None:
    for params in weights:
        params["model.norm.weight"][0] *= -1


def swap_gate_and_up(weights: list[Params]) -> None:
    for params in weights:
        fused = params["model.layers.1.mlp.gate_up_proj.weight"]
        fused.copy_(fused.roll(len(fused) // 2, 0))


def swap_two_elements(weights: list[Params]) -> None:
    bias = weights[0]["model.layers.0.self_attn.qkv_proj.bias"]
    bias[:2] = bias[:2].flip(0)


def swap_two_layers(weights: list[Params]) -> None:
    for params in weights:
        a, b = (params[f"model.layers.{i}.input_layernorm.weight"] for i in (0, 1))
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (flip_lowest_bit, {"model.layers.2.mlp.down_proj.weight"}),
        (flip_sign_everywhere, {"model.norm.weight"}),
        (swap_gate_and_up, {f"model.layers.1.mlp.{p}_proj.weight" for p in ("gate", "up")}),
        (swap_two_elements, {"model.layers.0.self_attn.q_proj.bias"}),
        (swap_two_layers, {f"model.layers.{i}.input_layernorm.weight" for i in (0, 1)}),
    ],
)
def test_a_fault_is_found_and_named(fault: Callable[[list[Params]], None], named: set[str]) -> None:
    weights = engine_weights(GQA, torch.bfloat16)
    fault(weights)
    assert set(engine_differs(GQA, weights, torch.bfloat16)) == named


def test_the_values_are_cast_as_on_the_wire() -> None:
    """fp32 master weights against their bf16 image."""
    weights = torch.linspace(-1, 1, 12).reshape(3, 4)
    box = Box.whole((3, 4))
    layout, _ = layouts_of(GQA)
    params = {
        name: torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)
        for name, shape in layout.local_shapes(0).items()
    }
    rounded = {name: p.bfloat16() for name, p in params.items()}
    verifier = WeightVerifier(layout, layout, 0, torch.bfloat16)
    assert torch.equal(verifier.checksums(params, params), verifier.checksums(rounded, rounded))
    assert box_checksum(weights, box, (3, 4), torch.float32) != box_checksum(
        weights, box, (3, 4), torch.bfloat16
    )


@given(st.integers(0, 6), st.integers(0, 7))
@settings(deadline=None)
def test_any_cut_of_a_tensor_sums_to_the_whole(row: int, column: int) -> None:
    values = torch.arange(6 * 7, dtype=torch.float32).reshape(6, 7).sin()
    shape = (6, 7)
    boxes = [
        Box((lo_r, lo_c), (hi_r - lo_r, hi_c - lo_c))
        for lo_r, hi_r in ((0, row), (row, 6))
        for lo_c, hi_c in ((0, column), (column, 7))
    ]
    parts = [
        box_checksum(values[b.slices], b, shape, values.dtype) for b in boxes if b.num_elements
    ]
    assert torch.stack(parts).sum() == box_checksum(values, Box.whole(shape), shape, values.dtype)


def test_a_large_tensor_is_summed_in_slices() -> None:
    shape = (3, (1 << 19) + 1)  # more than one slice holds
    values = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape).sin()
    rows = [Box((row, 0), (1, shape[1])) for row in range(shape[0])]
    parts = [box_checksum(values[b.slices], b, shape, values.dtype) for b in rows]
    assert torch.stack(parts).sum() == box_checksum(values, Box.whole(shape), shape, values.dtype)
