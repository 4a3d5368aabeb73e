"""Layout-invariant checksums: equal for equal bits in any layout, different for any fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.layout_arrays import PADDING, Array, Case, hf_arrays
from support.layout_cases import GQA, LATENT, MOE, SLICED, TIED, cases, layouts_of
from support.layout_oracle import megatron_params, vllm_params
from torch.profiler import ProfilerActivity, profile

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.proof import checksums as checksums_module
from mindspeed_rl.proof.checksums import ALL_ROWS, RowSample, box_checksum, fold_rows, sum_rows
from mindspeed_rl.weights import verify
from mindspeed_rl.weights.verify import SAMPLED_ROWS, WeightVerifier, copies_held, sampled_rows

Params = dict[str, torch.Tensor]
WEIGHT_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def as_weights(params: dict[str, Array], dtype: torch.dtype) -> Params:
    """Element numbers as weights of distinct bits; padding is garbage that must not count."""

    def weight(array: Array) -> torch.Tensor:
        ids = torch.from_numpy(array.copy())
        bits = torch.where(ids == PADDING, 0x3F12, ids % 16000 + 0x3000)
        return bits.to(WEIGHT_BITS[dtype]).view(dtype)

    return {name: weight(array) for name, array in params.items()}


def engine_weights(case: Case, dtype: torch.dtype) -> list[Params]:
    hf = hf_arrays(case)
    return [as_weights(vllm_params(case, hf, rank), dtype) for rank in range(case.world)]


def checksums(
    case: Case, weights: list[Params], dtype: torch.dtype, sample: int | None
) -> torch.Tensor:
    """Of the trainer and of an engine with ``weights``, with the all-reduce done by hand."""
    source, target = layouts_of(case)
    hf = hf_arrays(case)
    shares = []
    for rank in range(case.world):
        read = as_weights(megatron_params(case, hf, rank), dtype)
        verifier = WeightVerifier(source, target, rank, dtype)
        shares.append(verifier.checksums(read, weights[rank], sample))
    return torch.stack(shares).sum(0, dtype=torch.int32)


def engine_differs(
    case: Case, weights: list[Params], dtype: torch.dtype, sample: int | None = None
) -> list[str]:
    """The comparison of ``WeightVerifier``."""
    source, target = layouts_of(case)
    names = list(source.hf_shapes)
    assert set(names) == set(target.hf_shapes)
    read, written = checksums(case, weights, dtype, sample)
    wrong = (read * copies_held(target, names)[:, None] != written).any(1)
    return [name for name, bad in zip(names, wrong.tolist(), strict=True) if bad]


@given(cases(), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 40))
@settings(max_examples=25, deadline=None)
@example(GQA, torch.bfloat16, 0)
@example(TIED, torch.float32, 15)
@example(MOE, torch.bfloat16, 7)
@example(LATENT, torch.bfloat16, 23)
def test_trainer_and_engine_agree_in_any_pair_of_layouts(
    case: Case, dtype: torch.dtype, sample: int
) -> None:
    """By all rows and by a sample of them."""
    weights = engine_weights(case, dtype)
    assert engine_differs(case, weights, dtype) == []
    assert engine_differs(case, weights, dtype, sample) == []


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
    of_types = [box_checksum(weights, box, (3, 4), t) for t in (torch.float32, torch.bfloat16)]
    assert (of_types[0] != of_types[1]).all()


# --- samples --------------------------------------------------------------------------------


def test_every_row_is_in_one_of_some_samples_and_vectors_are_in_all() -> None:
    """They begin in other rows, layer by layer."""
    whole = Box.whole((40, 8))
    firsts = set()
    for tensor in range(20):
        seen: list[int] = []
        for sample in range(100, 100 + SAMPLED_ROWS):
            rows = sampled_rows(f"model.layers.{tensor}.mlp.experts.{{e}}.up_proj.weight", sample)
            assert rows.within(Box.whole((9,))) == range(1)
            seen += rows.within(whole)
        assert sorted(seen) == list(range(40))
        firsts.add(seen[0])
    assert len(firsts) > 10


def test_a_sample_finds_what_is_wrong_in_its_rows_alone() -> None:
    """Of samples in a row one finds a bit of a matrix; all find one of a vector."""

    def in_the_matrix(weights: list[Params]) -> None:
        weights[5]["model.layers.2.mlp.down_proj.weight"].view(torch.int16)[1, 1] ^= 1

    weights = engine_weights(GQA, torch.bfloat16)
    in_the_matrix(weights)
    found = [engine_differs(GQA, weights, torch.bfloat16, n) for n in range(SAMPLED_ROWS)]
    assert sorted(found) == [[]] * (SAMPLED_ROWS - 1) + [["model.layers.2.mlp.down_proj.weight"]]
    flip_sign_everywhere(weights)
    for sample in range(3):
        assert "model.norm.weight" in engine_differs(GQA, weights, torch.bfloat16, sample)


# --- runs of experts ------------------------------------------------------------------------

W2 = "model.layers.{}.mlp.experts.routed_experts.w2_weight"
DOWN = "model.layers.{}.mlp.experts.{}.down_proj.weight"


def flip_in_one_expert(weights: list[Params]) -> None:
    weights[6][W2.format(2)].view(torch.int16)[5, 1, 2] ^= 1


def swap_two_experts(weights: list[Params]) -> None:
    for params in weights:
        stack = params[W2.format(1)]
        stack[[0, 7]] = stack[[7, 0]]


@pytest.mark.parametrize(
    ("fault", "named", "row"),
    [
        (flip_in_one_expert, [DOWN.format(2, 5)], 2),
        (swap_two_experts, [DOWN.format(1, 0), DOWN.format(1, 7)], 1),
    ],
)
def test_experts_that_are_summed_together_are_named_one_by_one(
    fault: Callable[[list[Params]], None], named: list[str], row: int
) -> None:
    """In full, and by the sample that has a wrong row, but not by one that has no row."""
    weights = engine_weights(SLICED, torch.bfloat16)
    fault(weights)
    assert engine_differs(SLICED, weights, torch.bfloat16) == named
    kind = re.sub(r"experts\.\d+", "experts.{e}", named[0])
    rows = [sampled_rows(kind, n).within(Box.whole((3, 16))) for n in range(SAMPLED_ROWS)]
    has, has_not = rows.index(range(row, 3, 32)), next(n for n, one in enumerate(rows) if not one)
    assert engine_differs(SLICED, weights, torch.bfloat16, has) == named
    assert engine_differs(SLICED, weights, torch.bfloat16, has_not) == []


def test_the_experts_of_a_run_are_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they lie in one parameter, on each side; a parameter has at most two matrices."""
    source, target = layouts_of(SLICED)
    hf, pieces = hf_arrays(SLICED), 0

    def counted(*args: Any) -> None:
        nonlocal pieces
        pieces += 1
        sum_rows(*args)

    monkeypatch.setattr(verify, "sum_rows", counted)
    write = as_weights(vllm_params(SLICED, hf, 3), torch.bfloat16)
    for sample in (None, 0):
        pieces = 0
        WeightVerifier(source, target, 3, torch.bfloat16).checksums({}, write, sample)
        assert 0 < pieces <= 2 * len(write)


@pytest.mark.parametrize("limit", [1, 40, 1 << 19])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_together_have_the_checksums_of_each(
    limit: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where products of a row, of a matrix or of all do not fit into memory at once."""
    monkeypatch.setattr(checksums_module, "_CPU_DIGITS", limit)
    stack = patterns(3, 6, 5, dtype=torch.bfloat16)
    stack = stack.mT.contiguous().mT if transposed else stack
    shape, box = (11, 9), Box((4, 2), (6, 5))
    for rows in (ALL_ROWS, RowSample(1, 4)):
        sums = torch.empty(3 * rows.count(box), dtype=torch.int32)
        sum_rows(stack, box, stack.dtype, sums, rows)
        together = fold_rows(sums.numpy().view(np.uint32).reshape(3, -1), box, shape, rows)
        alone = [box_checksum(one, box, shape, one.dtype, rows).tolist() for one in stack]
        assert together.tolist() == alone and len({*map(tuple, alone)}) == 3


# --- rectangles -----------------------------------------------------------------------------

FP8 = torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, FP8: torch.int8}


def patterns(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Distinct numbers whose bits differ in all parts of an element."""
    numbers = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float32)
    return numbers.reshape(shape).sin().to(dtype)


def pair(values: torch.Tensor, rows: RowSample = ALL_ROWS) -> tuple[int, int]:
    """The checksum of a whole tensor."""
    shape = tuple(values.shape)
    first, second = box_checksum(values, Box.whole(shape), shape, values.dtype, rows).tolist()
    return first, second


def of_boxes(values: torch.Tensor, boxes: list[Box], rows: RowSample = ALL_ROWS) -> tuple[int, int]:
    """Sum of what rectangles give, each read out of the whole tensor."""
    shape, total = tuple(values.shape), np.zeros(2, dtype=np.uint32)
    for box in boxes:
        if rows.count(box) * box.num_elements:
            total += box_checksum(values[box.slices], box, shape, values.dtype, rows)
    return int(total[0]), int(total[1])


@given(
    st.integers(0, 6),
    st.integers(0, 7),
    st.sampled_from(list(BITS)),
    st.booleans(),
    st.integers(1, 4),
    st.integers(0, 3),
)
@settings(deadline=None)
def test_any_cut_of_a_tensor_sums_to_the_whole(
    row: int, column: int, dtype: torch.dtype, transposed: bool, every: int, phase: int
) -> None:
    """At any element, of all rows and of some, also where memory has another order."""
    values = patterns(7, 6, dtype=dtype).T if transposed else patterns(6, 7, dtype=dtype)
    boxes = [
        Box((lo_r, lo_c), (hi_r - lo_r, hi_c - lo_c))
        for lo_r, hi_r in ((0, row), (row, 6))
        for lo_c, hi_c in ((0, column), (column, 7))
    ]
    assert of_boxes(values, boxes) == pair(values)
    rows = RowSample(phase % every, every)
    assert of_boxes(values, boxes, rows) == pair(values, rows)
    phases = [pair(values, RowSample(n, every)) for n in range(every)]
    assert tuple(sum(one) % 2**32 for one in zip(*phases, strict=True)) == pair(values)


@DTYPES
def test_vectors_and_stacks_of_matrices_are_cut_as_well(dtype: torch.dtype) -> None:
    vector, stack = patterns(9, dtype=dtype), patterns(3, 4, 5, dtype=dtype)
    assert of_boxes(vector, [Box((i,), (3,)) for i in (0, 3, 6)]) == pair(vector)
    ends = [Box((0, 0, 0), (3, 4, 2)), Box((0, 0, 2), (2, 4, 3)), Box((2, 0, 2), (1, 4, 3))]
    assert of_boxes(stack, ends) == pair(stack)
    assert of_boxes(stack, ends, RowSample(1, 3)) == pair(stack, RowSample(1, 3))
    assert pair(stack.reshape(12, 5)) == pair(stack), "rows are numbered in row-major order"


@pytest.mark.parametrize("shape", [(3, (1 << 19) + 1), ((1 << 20) + 3,), (1500, 1001)])
def test_a_large_tensor_is_summed_in_slices(shape: tuple[int, ...]) -> None:
    values = patterns(*shape, dtype=torch.bfloat16)
    cuts = [i * shape[0] // 3 for i in range(4)]
    rest = shape[1:]
    boxes = [Box((lo, *(0 for _ in rest)), (hi - lo, *rest)) for lo, hi in pairwise(cuts)]
    assert of_boxes(values, boxes) == pair(values) == defined(values)


@DTYPES
@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_a_tensor_may_begin_anywhere_in_memory(dtype: torch.dtype, offset: int) -> None:
    """Bytes are never joined to words that would have to begin at a multiple of their size."""
    values = patterns(35, dtype=dtype)
    memory = torch.zeros(41, dtype=dtype)
    memory[offset : offset + 35] = values
    assert pair(memory[offset : offset + 35].view(5, 7)) == pair(values.view(5, 7))


def test_a_device_gets_the_sums_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose product and sum are two operators; as on a device, run here."""
    for dtype in BITS:
        values = patterns(9, 4, 6, dtype=dtype)[:, :, 1:]
        expected = pair(values)
        with monkeypatch.context() as patch:
            patch.setattr(checksums_module, "_is_cpu", lambda device: False)
            assert pair(values) == expected


def splitmix64(number: int) -> int:
    """The number in its published sequence from seed 0, in Python's integers; the first is 1."""
    full = 2**64 - 1
    value = number * 0x9E3779B97F4A7C15 & full
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & full
    value = (value ^ value >> 27) * 0x94D049BB133111EB & full
    return value ^ value >> 31


def defined(values: torch.Tensor) -> tuple[int, int]:
    """The definition: digit x weight of its column x weight of its row, exactly, of a matrix."""
    size, count = values.element_size(), values.shape[-1]
    kind = np.int8 if size == 1 else np.int16
    digits = values.contiguous().view(torch.uint8).numpy().view(kind).astype(np.int64)
    digits = digits.reshape(-1, count * max(1, size // 2))
    columns = np.array([splitmix64(j + 1) & 0xFFFFFFFF | 1 for j in range(digits.shape[1])])
    total = [0, 0]
    for i, line in enumerate(digits):
        of_row = sum((line * columns).tolist())
        weights = splitmix64((1 << 48) + i + 1)
        total[0] += of_row * (weights & 0xFFFFFFFF | 1)
        total[1] += of_row * (weights >> 32 | 1)
    return total[0] % 2**32, total[1] % 2**32


@DTYPES
def test_the_checksum_is_its_definition(dtype: torch.dtype) -> None:
    assert splitmix64(1) == 0xE220A8397B1DCDAF, "the published first number"
    for shape in ((5, 8), (6, 7), (11,)):
        assert pair(patterns(*shape, dtype=dtype)) == defined(patterns(*shape, dtype=dtype))


@DTYPES
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    """All bits of a matrix and of a vector, one after the other."""
    for shape in ((5, 7), (11,)):
        values = patterns(*shape, dtype=dtype)
        bits = values.view(BITS[dtype]).flatten()
        size = 8 * values.element_size()
        seen = {pair(values)}
        for place in range(bits.numel()):
            for bit in range(size):
                flip = 1 << bit if bit < size - 1 else -(1 << bit)
                bits[place] ^= flip
                seen.add(pair(values))
                bits[place] ^= flip
        assert len(seen) == 1 + bits.numel() * size, "no two of these tensors have one checksum"


@DTYPES
def test_changes_that_cancel_out_in_a_shorter_sum_are_found(dtype: torch.dtype) -> None:
    """An even number of signs, which odd weights of 16 bits would lose; rows and columns."""
    values = patterns(4, 6, dtype=dtype)
    bits = values.view(BITS[dtype])
    sign = -1 << (8 * values.element_size() - 1)
    changed = [bits.clone() for _ in range(5)]
    changed[0][0, 1] ^= sign
    changed[0][2, 3] ^= sign
    changed[1][1, 0] ^= sign
    changed[1][1, 4] ^= sign
    changed[2] ^= sign
    changed[3][[0, 1]] = changed[3][[1, 0]]
    changed[4][:, [0, 1, 4, 5]] = changed[4][:, [4, 5, 0, 1]]
    sums = [pair(one.view(dtype)) for one in (bits, *changed)]
    assert len(set(sums)) == len(sums)


# Views, allocations and wrappers.
WITHOUT_WORK = {
    *("alias", "as_strided", "detach", "reshape", "select", "slice", "t", "transpose", "unsqueeze"),
    *("empty", "empty_strided", "resolve_conj", "resolve_neg", "to", "_to_copy", "view"),
}


def kernels_of(event: Any) -> list[str]:
    """The operators within a profiled one, or itself, that touch the elements of tensors."""
    inner = [kernel for child in event.cpu_children for kernel in kernels_of(child)]
    name = event.name.removeprefix("aten::")
    works = name != event.name and name not in WITHOUT_WORK
    return inner or ([name] if works else [])


def test_a_piece_takes_two_kernels() -> None:
    """Of the CPU, for all its rows: the widening of its digits, and their product and sum."""
    values = patterns(64, 256, dtype=torch.bfloat16)
    box, sums = Box.whole((64, 256)), torch.empty(64, dtype=torch.int32)
    sum_rows(values, box, torch.bfloat16, sums)  # makes the weights
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        sum_rows(values, box, torch.bfloat16, sums)
    outermost = [event for event in profiled.events() if event.cpu_parent is None]
    assert [name for event in outermost for name in kernels_of(event)] == ["copy_", "mm"]


@pytest.mark.parametrize("shortest", [1, 100])
def test_a_device_whose_integers_do_not_wrap_is_told(
    monkeypatch: pytest.MonkeyPatch, shortest: int
) -> None:
    """Before sums of it are compared with others, also if only long rows are summed wrongly."""

    def saturated(digits: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        exact = (digits.to(torch.int64) * weights).sum(-1)
        wraps = digits.shape[-1] < shortest
        out.copy_(exact if wraps else exact.clamp(-(2**31), 2**31 - 1))

    monkeypatch.setattr(checksums_module, "_sum_digits", saturated)
    with pytest.raises(RuntimeError, match=r"-?214748364[78]\b.* on cpu and should be \["):
        checksums_module.check_arithmetic.__wrapped__(torch.device("cpu"))
