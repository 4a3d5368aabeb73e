"""Every operator that runs on a device has a kernel for AI Cores, or is listed with its cost.

``ai_core_kernels.toml`` has facts of CANN's open operator repositories. An operator or a type that
is not there runs on the AICPU, which takes milliseconds where an AI Core takes microseconds, or on
nothing that its sources show.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache, reduce
from pathlib import Path
from typing import Any

import make_tiny_model
import pytest
import torch
from ascend import census_worlds, sampling_worlds
from ascend.emulator.census import FOLDER, Call, read
from ascend.npu_ranks import run_npu_ranks
from support.family_models import FAMILY_CASES, VOCAB, write_family_model

from mindspeed_rl.core.layout import EngineLayout

pytestmark = [pytest.mark.ascend_emul, pytest.mark.slow]

Record = tuple[dict[Call, str], set[Call]]
# Views, and copies to the host.
_NO_KERNEL = ("aten::_unsafe_view", "aten::_local_scalar_dense")
_COPIES = (
    *("aten::_to_copy", "aten::copy", "aten::clone"),
    *("npu::_npu_dtype_cast", "npu::_npu_dtype_cast_backward"),
)


@cache
def facts() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "ai_core_kernels.toml").read_text())


@cache
def kernels() -> Mapping[str, Mapping[str, Any]]:
    """The entries of the table by operator."""
    return {name: entry for entry in facts()["kernel"] for name in entry["operators"]}


def promoted(types: tuple[str, ...]) -> str:
    found = reduce(torch.promote_types, (getattr(torch, name) for name in types))
    return str(found).removeprefix("torch.")


def missing(call: Call) -> list[str]:
    """What the table lacks for a call: an entry, a type of its kernel, or a cast."""
    if call.crosses or call.operator in _NO_KERNEL or call.operator.startswith("c10d::"):
        return []  # copies between host and device; HCCL moves the rest
    if call.operator in _COPIES and call.inputs[-1:] != call.outputs:
        (given,), (made,) = call.inputs[-1:], call.outputs
        return [] if made in facts()["casts"].get(given, ()) else [f"cast {given} -> {made}"]
    entry = kernels().get(call.operator)
    if entry is None:
        return [call.operator]
    types = call.inputs or call.outputs
    cast: tuple[str, ...] = ()
    if entry.get("by") == "first":
        computed = types[0]
    elif entry.get("by") == "last":
        computed = types[-1]
    elif entry.get("by") == "output":
        computed = call.outputs[0]
        cast = tuple(one for one in types if one != computed)
    else:
        computed = promoted(types)
        cast = tuple(sorted({one for one in types if one != computed}))
    lacks = [] if computed in entry["types"] else [f"{call.operator} {computed}"]
    return lacks + [
        f"cast {one} -> {computed}" for one in cast if computed not in facts()["casts"].get(one, ())
    ]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Of a training step, a reshard with its proof, and engines that load, sample and draft.

    And the calls of the proof alone.
    """
    root = tmp_path_factory.mktemp("census")
    names = ("qwen3-moe", "deepseek")
    models = {n: str(write_family_model(FAMILY_CASES[n], root / n)) for n in names}
    tiny = make_tiny_model.write_tiny_model(root / "tiny", family="qwen3_moe", seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(root / "census"))
        args = (models, VOCAB, ("--tensor-model-parallel-size", "2", "--sequence-parallel"))
        ranks = run_npu_ranks(census_worlds.train_and_prove, 2, work_dir=root / "train", args=args)
        args = (str(tiny), "bfloat16", EngineLayout(1, 1))
        run_npu_ranks(census_worlds.load_and_sample, 1, work_dir=root / "engine", args=args)
        args = (str(tiny), True, 256, "bfloat16")
        run_npu_ranks(sampling_worlds.twice, 1, work_dir=root / "drafts", args=args)
    proofs: set[Call] = set()
    for differing, calls in ranks:
        assert differing == {name: [] for name in names}
        proofs |= calls
    return read(root / "census"), proofs


def test_what_runs_on_the_aicpu_is_known(record: Record) -> None:
    """And nothing is listed that no longer runs."""
    calls, _ = record
    found: dict[str, set[str]] = {}
    for call, place in calls.items():
        for lack in missing(call):
            found.setdefault(lack, set()).add(place)
    known = {entry["what"] for entry in facts()["elsewhere"]}
    assert found.keys() - known == set(), {n: found[n] for n in found.keys() - known}
    assert known - found.keys() == set()
    assert len(calls) > 100


def test_the_proof_of_weights_runs_on_ai_cores(record: Record) -> None:
    """All of it: casts, products and sums."""
    _, proof = record
    assert {"aten::mul", "aten::sum"} <= {call.operator for call in proof}
    assert [lack for call in proof for lack in missing(call)] == []


def test_a_shift_and_an_unknown_type_are_noticed() -> None:
    """What the checksum used to do, and a product of a type without a kernel."""
    shift = Call("aten::__rshift__", ("int64",), ("int64",), False)
    assert missing(shift) == ["aten::__rshift__"]
    assert missing(Call("aten::mul", ("float64", "float32"), ("float64",), False)) == [
        "aten::mul float64",
        "cast float32 -> float64",
    ]
    assert missing(Call("aten::mul", ("int32", "int64"), ("int64",), False)) == []
