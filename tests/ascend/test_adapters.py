"""Adapters on an emulated NPU: values, gradients and updates are those of transformers on one rank.

With megatron-core's own modules, and with those of MindSpeed's real adaptor, whose experts are read
from lists of their module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend.npu_ranks import needs_mindspeed, run_npu_ranks
from safetensors.torch import load_file
from support.adapter_worlds import ALPHA, RANK, AdapterFacts, adapter_world, reference
from support.family_models import FAMILY_CASES, VOCAB, write_family_model
from support.training_worlds import make_samples, relative_errors

pytestmark = pytest.mark.ascend_emul

_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_EP2 = ("--expert-model-parallel-size", "2", "--moe-grouped-gemm")
_GROUPED = {"moe_grouped_gemm": True}


@dataclass(frozen=True)
class AdaptedWay:
    """A model and how it is trained; ``features`` are MindSpeed's, ``None`` without its adaptor."""

    family: str
    ranks: int = 1
    flags: tuple[str, ...] = ()
    features: Mapping[str, Any] | None = field(default=None, hash=False)


WAYS = {
    "own-modules": AdaptedWay("qwen3-moe"),
    "mindspeed": AdaptedWay("qwen3", features={"use_fused_rmsnorm": True}),
    "mindspeed-tp2": AdaptedWay("qwen3", 2, _TP2, {}),
    "mindspeed-grouped": AdaptedWay("qwen3-moe", 1, ("--moe-grouped-gemm",), _GROUPED),
    "mindspeed-ep2": AdaptedWay("qwen3-moe", 2, _EP2, _GROUPED),
    "mindspeed-latent": AdaptedWay("deepseek", 1, ("--moe-grouped-gemm",), _GROUPED),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=needs_mindspeed if w.features is not None else ())
     for n, w in WAYS.items()],
)  # fmt: skip
def test_adapters_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    way = WAYS[name]
    model = write_family_model(FAMILY_CASES[way.family], tmp_path / "model")
    folder, samples = tmp_path / "adapter", tuple(make_samples(VOCAB))
    facts: list[AdapterFacts] = run_npu_ranks(
        adapter_world, way.ranks, work_dir=tmp_path / "ranks",
        args=(way.flags, str(model), samples, str(folder)), features=way.features,
    )  # fmt: skip
    found = facts[0]
    tensors = load_file(folder / "adapter_model.safetensors")
    expected = reference(model, tensors, ALPHA / RANK, samples)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=5e-5)
    torch.testing.assert_close(found.base_logprobs, expected.base_logprobs, rtol=0, atol=5e-5)
    errors = relative_errors(found.gradients, expected.gradients)
    assert not {name: error for name, error in errors.items() if error >= 2e-5}
    merged = {name: expected.merged[name] for name in found.merged}
    assert max(relative_errors(found.merged, merged).values()) < 1e-6
    first = {name.removeprefix("base_model.model."): t for name, t in tensors.items()}
    assert all(not torch.equal(found.trained[name], first[name]) for name in first)
    for fact in facts:
        measured, predicted = fact.owners
        assert measured["parameters"] == predicted["parameters"]
        assert fact.base_digest == found.base_digest
