"""Adapters on real ranks, in every kind of layout, against transformers on one rank."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.adapter_worlds import (
    ALPHA,
    RANK,
    AdapterFacts,
    Resumed,
    adapter_world,
    continued_world,
    logprobs_of,
    reference,
    resumed_world,
)
from support.family_models import FAMILY_CASES, VOCAB, FamilyCase, write_family_model
from support.spawn import run_ranks
from support.tiers import slow_but
from support.training_worlds import make_samples, relative_errors

pytestmark = pytest.mark.distributed

_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_PP2 = ("--pipeline-model-parallel-size", "2")
_EP2 = ("--expert-model-parallel-size", "2")
_ONE_ETP = ("--expert-tensor-parallel-size", "1")
_RECOMPUTED = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
_SHARDED = ("--use-distributed-optimizer",)
# Family, ranks, flags.
WORLDS = {
    "one": ("qwen3", 1, ()),
    "one-recomputed": ("qwen3", 1, _RECOMPUTED),
    "tp2": ("qwen3", 2, (*_TP2, *_SHARDED)),
    "tp2-plain": ("qwen2-tied", 2, _TP2[:2]),
    "dp2": ("qwen2-tied", 2, _SHARDED),
    "cp2": ("qwen3", 2, ("--context-parallel-size", "2")),
    "tied-pp2": ("qwen2-tied", 2, (*_PP2, "--lora-rslora")),
    "vpp2": ("qwen3", 2, (*_PP2, "--num-virtual-stages-per-pipeline-rank", "2")),
    "tp2-pp2": ("qwen3", 4, (*_TP2, *_PP2, *_RECOMPUTED)),
    "some": ("qwen3", 2, (*_TP2, "--lora-target", "k_proj", "up_proj")),
    "experts": ("qwen3-moe", 1, ()),
    "ep2": ("qwen3-moe", 2, (*_EP2, *_SHARDED)),
    "tp2-ep2": ("qwen3-moe", 2, (*_TP2, *_EP2, *_ONE_ETP)),
    "etp2-ep2": ("qwen3-moe", 4, (*_TP2, *_EP2, *_SHARDED)),
    "latent": ("deepseek", 1, ("--lora-rslora",)),
    "latent-tp2": ("deepseek", 2, (*_TP2, *_SHARDED)),
    "latent-ep2": ("deepseek", 2, (*_EP2, *_RECOMPUTED)),
    "latent-pp2": ("deepseek-plain", 2, _PP2),
    "latent-tp2-ep2": ("deepseek-plain", 2, (*_TP2, *_EP2, *_ONE_ETP)),
}


@cache
def samples() -> tuple[object, ...]:
    return tuple(make_samples(VOCAB))


@pytest.mark.parametrize("name", slow_but(WORLDS, ["one", "tp2", "tp2-ep2", "latent-tp2"]))
def test_adapters(name: str, tmp_path: Path) -> None:
    """Log-probs, gradients, merged weights, and two steps of the optimizer."""
    family, ranks, flags = WORLDS[name]
    model = write_family_model(FAMILY_CASES[family], tmp_path / "model")
    folder = tmp_path / "adapter"
    facts: list[AdapterFacts] = run_ranks(
        adapter_world,
        ranks,
        work_dir=tmp_path,
        args=(flags, str(model), samples(), str(folder)),
    )
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = ALPHA / (RANK**0.5 if "--lora-rslora" in flags else RANK)
    expected = reference(model, tensors, scale, samples())
    found = facts[0]
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(found.base_logprobs, expected.base_logprobs, rtol=0, atol=2e-5)
    assert max(map(distance, found.logprobs, found.base_logprobs)) > 0.05
    errors = relative_errors(found.gradients, expected.gradients)
    assert not {name: error for name, error in errors.items() if error >= 1e-5}
    merged = {name: expected.merged[name] for name in found.merged}
    assert max(relative_errors(found.merged, merged).values()) < 1e-6
    norm = torch.cat([g.flatten() for g in expected.gradients.values()]).norm()
    assert found.grad_norms[0] == pytest.approx(float(norm), rel=1e-5)
    first = {name.removeprefix("base_model.model."): t for name, t in tensors.items()}
    assert all(not torch.equal(found.trained[name], first[name]) for name in first)
    for fact in facts:
        measured, predicted = fact.owners
        shares = predicted.pop("optimizer")  # of few elements, whose division is not quite even
        assert measured.pop("optimizer") == pytest.approx(shares, rel=0.02)
        assert measured == predicted
        assert fact.base_digest == found.base_digest
    config = json.loads((folder / "adapter_config.json").read_text())
    root = RANK**0.5 if config["use_rslora"] else RANK
    assert config["r"] == RANK and config["lora_alpha"] / root == pytest.approx(scale)
    assert set(config["target_modules"]) == {name.split(".")[-3] for name in tensors}


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max())


def in_peft(model: Path, folder: Path) -> Any:
    """The model with the adapters of a folder, by PEFT, trainable."""
    peft = pytest.importorskip("peft", reason="the section dev of versions.cfg has it")
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, experts_implementation="eager"
    )
    return peft.PeftModel.from_pretrained(network, folder, is_trainable=True)


def written(
    case: FamilyCase, tmp_path: Path, flags: tuple[str, ...] = ()
) -> tuple[Path, Path, AdapterFacts]:
    """A model, the folder of adapters that one rank wrote for it, and what the rank saw."""
    model = write_family_model(case, tmp_path / "model")
    folder = tmp_path / "adapter"
    facts: list[AdapterFacts] = run_ranks(
        adapter_world, 1, work_dir=tmp_path, args=(flags, str(model), samples(), str(folder))
    )
    return model, folder, facts[0]


_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("qwen3", ()),
        pytest.param(
            "deepseek", ("--lora-rslora", "--lora-target", *_LATENT), marks=pytest.mark.slow
        ),
        pytest.param(
            "deepseek-plain",
            ("--lora-target", "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["qwen3", "latent", "latent-plain"],
)
def test_peft_loads_the_files_and_has_these_gradients(
    family: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Log-probs and gradients, fp32, of PEFT's own layers with what it reads from the files."""
    model, folder, facts = written(FAMILY_CASES[family], tmp_path, flags)
    adapted = in_peft(model, folder)
    found = logprobs_of(adapted, samples())
    torch.testing.assert_close(facts.logprobs, [part.detach() for part in found], rtol=0, atol=2e-5)
    torch.cat(found).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad
        for name, parameter in adapted.named_parameters()
        if "lora_" in name
    }
    errors = relative_errors(facts.gradients, gradients)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.slow
def test_peft_loads_adapters_of_experts(tmp_path: Path) -> None:
    """PEFT joins the adapters of gate and up of all experts, as transformers 5 does the weights.

    It does so in models without dense layers only.
    """
    case = FAMILY_CASES["qwen3-moe"]
    sparse = replace(case, changes={**case.changes, "mlp_only_layers": []})
    model, folder, facts = written(sparse, tmp_path)
    with torch.no_grad():
        found = logprobs_of(in_peft(model, folder), samples())
    torch.testing.assert_close(facts.logprobs, found, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "precision", "other_layout"),
    [
        ("tp2", (), "one"),
        pytest.param("tp2", ("--bf16",), "tp2", marks=pytest.mark.slow),
        pytest.param("etp2-ep2", (), "experts", marks=pytest.mark.slow),
        pytest.param("vpp2", (), "dp2", marks=pytest.mark.slow),
    ],
    ids=["tp2-one", "bf16", "etp2-ep2-experts", "vpp2-dp2"],
)
def test_checkpoints_hold_adapters_alone(
    name: str, precision: tuple[str, ...], other_layout: str, tmp_path: Path
) -> None:
    """A resumed run has the bits of the uninterrupted one; another layout trains on from it."""
    family, ranks, flags = WORLDS[name]
    flags = (*flags, *precision)
    model = write_family_model(FAMILY_CASES[family], tmp_path / "model")
    other = write_family_model(FAMILY_CASES[family], tmp_path / "other", seed=3)
    folder = tmp_path / "save"
    found: list[Resumed] = run_ranks(
        resumed_world,
        ranks,
        work_dir=tmp_path,
        args=(flags, str(model), str(other), str(folder)),
    )
    for rank in found:
        assert rank.resumed.keys() == rank.whole.keys()
        for key, values in rank.whole.items():
            assert torch.equal(rank.resumed[key], values), key
        norms, rest = rank.norms
        assert rest == norms[2:]
        assert "other weights than --hf-checkpoint" in rank.refusals["base"]
        assert f"--lora-rank {RANK} (this run: 2)" in rank.refusals["rank"]
        assert "this run trains all weights; add --lora-rank" in rank.refusals["whole"]
    whole = {key: values for rank in found for key, values in rank.whole.items()}
    masters = ("param",) * ("--use-distributed-optimizer" in flags)  # elsewhere the weights are
    assert saved_tensors(folder / "iter_0000002") == {
        f"{prefix}adapters.{name}"
        for name in whole
        for prefix in ("", *(f"optimizer.state.{s}." for s in (*masters, "exp_avg", "exp_avg_sq")))
    }
    _, ranks, flags = WORLDS[other_layout]
    sharded = ("--use-distributed-optimizer",) * ("--use-distributed-optimizer" in WORLDS[name][2])
    own = (*(f for f in flags if f != "--use-distributed-optimizer"), *sharded, *precision)
    continued: list[dict[str, Any]] = run_ranks(
        continued_world, ranks, work_dir=tmp_path, args=(own, str(model), str(folder))
    )
    errors = relative_errors(continued[0], whole)
    assert max(errors.values()) < 1e-4, errors


def saved_tensors(folder: Path) -> set[str]:
    """Names of the tensors of a checkpoint, without the numbers of optimizers."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = [n for n, kind in found.items() if isinstance(kind, TensorStorageMetadata)]
    return {re.sub(r"^chained_\d+\.", "", name) for name in tensors}
