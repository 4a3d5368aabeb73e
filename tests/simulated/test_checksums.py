"""Layout-invariant checksums: equal for equal bits in any layout, different for any fault."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.layout_arrays import PADDING, Array, Case, hf_arrays
from support.layout_cases import GQA, LATENT, MOE, TIED, cases, layouts_of
from support.layout_oracle import megatron_params, vllm_params

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.weights import checksums as checksums_module
from mindspeed_rl.weights.checksums import box_checksum
from mindspeed_rl.weights.verify import WeightVerifier, copies_held

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
    assert box_checksum(weights, box, torch.float32) != box_checksum(weights, box, torch.bfloat16)


DTYPES = pytest.mark.parametrize("dtype", BITS)


def patterns(*shape: int) -> torch.Tensor:
    """Distinct numbers whose bits differ in all parts of a word."""
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float32).reshape(shape).sin()


def of_boxes(values: torch.Tensor, boxes: list[Box]) -> torch.Tensor:
    """Sum of what rectangles give, each read out of the whole tensor."""
    parts = [box_checksum(values[b.slices], b, values.dtype) for b in boxes if b.num_elements]
    return torch.stack(parts).sum()


@given(st.integers(0, 6), st.integers(0, 7), st.sampled_from(list(BITS)), st.booleans())
@settings(deadline=None)
def test_any_cut_of_a_tensor_sums_to_the_whole(
    row: int, column: int, dtype: torch.dtype, transposed: bool
) -> None:
    """Also where a cut falls between the two elements of a word."""
    values = patterns(7, 6).T if transposed else patterns(6, 7)
    values = values.to(dtype)
    boxes = [
        Box((lo_r, lo_c), (hi_r - lo_r, hi_c - lo_c))
        for lo_r, hi_r in ((0, row), (row, 6))
        for lo_c, hi_c in ((0, column), (column, 7))
    ]
    assert of_boxes(values, boxes) == box_checksum(values, Box.whole((6, 7)), dtype)


@DTYPES
def test_vectors_and_stacks_of_matrices_are_cut_as_well(dtype: torch.dtype) -> None:
    vector, stack = patterns(9).to(dtype), patterns(3, 4, 5).to(dtype)
    thirds = [Box((i,), (3,)) for i in (0, 3, 6)]
    assert of_boxes(vector, thirds) == box_checksum(vector, Box.whole((9,)), dtype)
    ends = [Box((0, 0, 0), (3, 4, 2)), Box((0, 0, 2), (2, 4, 3)), Box((2, 0, 2), (1, 4, 3))]
    assert of_boxes(stack, ends) == box_checksum(stack, Box.whole((3, 4, 5)), dtype)


@pytest.mark.parametrize("shape", [(3, (1 << 19) + 1), ((1 << 20) + 3,)])
def test_a_large_tensor_is_summed_in_slices(shape: tuple[int, ...]) -> None:
    values = patterns(*shape)
    cuts = [i * shape[0] // 3 for i in range(4)]
    rest = shape[1:]
    boxes = [Box((lo, *(0 for _ in rest)), (hi - lo, *rest)) for lo, hi in pairwise(cuts)]
    assert of_boxes(values, boxes) == box_checksum(values, Box.whole(shape), values.dtype)


def splitmix64(number: int) -> int:
    """The number in its published sequence from seed 0, in Python's integers; the first is 1."""
    full = 2**64 - 1
    value = number * 0x9E3779B97F4A7C15 & full
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & full
    value = (value ^ value >> 27) * 0x94D049BB133111EB & full
    return value ^ value >> 31


@DTYPES
def test_the_checksum_is_its_definition(dtype: torch.dtype) -> None:
    """The sum of word x weight of its column x weight of its row, in Python's integers."""
    assert splitmix64(1) == 0xE220A8397B1DCDAF, "the published first number"
    values = patterns(5, 8).to(dtype)
    words = values.view(torch.int32).tolist()
    expected = 0
    for i, row in enumerate(words):
        for j, word in enumerate(row):
            weights = splitmix64(j + 1) | 1, splitmix64((1 << 48) + i + 1) | 1
            expected += word * weights[0] * weights[1]
    found = int(box_checksum(values, Box.whole((5, 8)), dtype))
    assert found % 2**64 == expected % 2**64


@DTYPES
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    """All bits of a matrix and of a vector, one after the other."""
    for shape in ((5, 7), (11,)):
        values = patterns(*shape).to(dtype)
        bits = values.view(BITS[dtype]).flatten()
        size = 8 * values.element_size()
        seen = {int(box_checksum(values, Box.whole(shape), dtype))}
        for place in range(bits.numel()):
            for bit in range(size):
                flip = 1 << bit if bit < size - 1 else -(1 << bit)
                bits[place] ^= flip
                seen.add(int(box_checksum(values, Box.whole(shape), dtype)))
                bits[place] ^= flip
        assert len(seen) == 1 + bits.numel() * size, "no two of these tensors have one checksum"


@DTYPES
def test_changes_that_cancel_out_in_a_shorter_sum_are_found(dtype: torch.dtype) -> None:
    """An even number of signs, which modulo 2^32 all odd weights would lose; rows and columns."""
    values = patterns(4, 6).to(dtype)
    changed = [values.clone() for _ in range(4)]
    changed[0][0, 1] *= -1
    changed[0][2, 3] *= -1
    changed[1].neg_()
    changed[2][[0, 1]] = changed[2][[1, 0]]
    changed[3][:, [0, 1, 4, 5]] = changed[3][:, [4, 5, 0, 1]]
    sums = [int(box_checksum(one, Box.whole((4, 6)), dtype)) for one in (values, *changed)]
    assert len(set(sums)) == len(sums)


def test_a_device_whose_integers_do_not_wrap_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before sums of it are compared with others."""
    device = torch.device("cpu", 7)
    sums = iter((2**62 + 3, 2**63 - 1))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    monkeypatch.setattr(checksums_module, "box_checksum", lambda *_: torch.tensor(next(sums)))
    with pytest.raises(RuntimeError, match=r"9223372036854775807 on cpu:7 and 4611686018427387907"):
        checksums_module.check_arithmetic(device)
