"""A model that drafts: what of it is read, how large it is, and what it must have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.draft_models import speculation, write_draft_model, write_eagle_head
from support.layout_cases import GQA, LATENT, spec_of

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.engines.vllm.drafting import check_drafts, with_weights
from mindspeed_rl.rollout.draft_model import (
    cached_values,
    check_draft_model,
    check_own_drafts,
    draft_model_of,
)
from mindspeed_rl.vllm_patches import draft_weights

SPEC = spec_of(GQA)
FITS = {"vocab_size": SPEC.vocab_size}


def options(method: str, folder: Path, /, **changes: Any) -> dict[str, Any]:
    """The engine's options; ``None`` takes a key away."""
    given = {"method": method, "model": str(folder), "num_speculative_tokens": 4} | changes
    return {"speculative_config": {k: v for k, v in given.items() if v is not None}}


def test_sizes_of_a_draft_model_are_those_of_its_files(tmp_path: Path) -> None:
    """Matrices are shared by ranks, vectors are whole; heads of keys are there at least once."""
    draft = draft_model_of(
        options("draft_model", write_draft_model(tmp_path), num_speculative_tokens=5)
    )
    assert draft is not None and draft.tokens == 5 and not draft.is_head
    matrices = 307 * 48 + 96 * 48
    assert draft.elements(1) == matrices + 96
    assert draft.elements(2) == matrices // 2 + 96
    assert [draft.cached_values(tp) for tp in (1, 2, 4)] == [2 * 3 * 32, 2 * 3 * 16, 2 * 3 * 16]
    assert cached_values(SPEC, draft, 2) == SPEC.cached_values(2) + 2 * 3 * 16
    assert cached_values(SPEC, None, 2) == SPEC.cached_values(2)
    assert draft.buffered_values(7) == 2 * 7 * 48


def test_tables_of_a_head_are_no_weights(tmp_path: Path) -> None:
    """Its projection is whole on every rank, and the policy's embeddings are not its own."""
    third = draft_model_of(options("eagle3", write_eagle_head(tmp_path, "eagle3")))
    assert third is not None and third.is_head
    layer = 64 * 128 + 2 * 32 * 128 + 64 * 64 + 3 * 128 * 64
    assert third.elements(2) == (layer + 100 * 64) // 2 + 64 * 192 + 4 * 64


def test_other_drafts_have_no_model(tmp_path: Path) -> None:
    assert draft_model_of({}) is None
    assert draft_model_of({"speculative_config": {"method": "ngram"}}) is None
    given: dict[str, object] = {"method": "ngram", "num_speculative_tokens": 2}
    assert with_weights(given, 2) == given


@dataclass
class Loading:
    """What vLLM's functions read of its configuration."""

    load_config: Any
    speculative_config: Any


def test_a_draft_model_is_not_loaded_like_the_policy() -> None:
    """The proposer builds it by a configuration whose way of loading is that of the files."""
    own, drawn = object(), SimpleNamespace(load_format="dummy")
    given = Loading(drawn, SimpleNamespace(draft_load_config=own))
    found = draft_weights._with_own_loading(lambda self: given)(None)
    assert found.load_config is own and given.load_config is drawn
    draft_weights.apply()  # vLLM has what is patched


def test_the_engine_is_told_to_load_it(tmp_path: Path) -> None:
    head = write_eagle_head(tmp_path, "eagle")
    found = with_weights(options("eagle", head)["speculative_config"], 2)
    assert found["draft_load_config"] == {"load_format": "safetensors", "use_tqdm_on_load": False}
    assert found["draft_tensor_parallel_size"] == 2 and found["model"] == str(head)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_speculative_tokens": None}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 0}, "at least 1"),
        ({"draft_tensor_parallel_size": [2]}, "draft_tensor_parallel_size must be a whole number"),
        ({"model": None}, "model must be the directory"),
        ({"model": "/no/where"}, "/no/where is no directory"),
        ({"quantization": "fp8"}, "quantization was not verified"),
        ({"method": "mtp"}, "MTP layers"),
        ({"method": "medusa"}, "medusa.*one of ngram, suffix, custom_class, draft_model"),
        ({"method": None}, "must be a JSON object whose \"method\""),
    ],
)  # fmt: skip
def test_configurations_that_are_wrong_are_refused(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    given = options("draft_model", write_draft_model(tmp_path), **changes)
    with pytest.raises(UsageError, match=f"--vllm-speculative-config .*{named}"):
        engine_provider().check_options(given)


@pytest.mark.parametrize(
    ("method", "changes", "named"),
    [
        ("draft_model", {"num_experts": 8}, "has experts"),
        ("draft_model", {"kv_lora_rank": 512}, "latent or sliding"),
        ("draft_model", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ("draft_model", {"layer_types": [["full_attention"]]}, "sliding"),
        ("draft_model", {"layer_types": 4}, "sliding"),
        ("draft_model", {"sliding_window": 128}, "sliding"),
        ("draft_model", {"quantization_config": {}}, "quantised"),
        ("draft_model", {"hidden_size": None}, "hidden_size is None"),
        ("draft_model", {"num_key_value_heads": "2"}, "num_key_value_heads is 2; it must be a who"),
        ("draft_model", {"head_dim": 0}, "head_dim is 0; it must be a whole number"),
        ("eagle", {}, "model_type qwen2 of an EAGLE head"),
    ],
)
def test_models_that_were_not_run_are_refused(
    method: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"--vllm-speculative-config.*{named}"):
        check_own_drafts(options(method, write_draft_model(tmp_path, changes)))


def test_a_window_that_is_not_used_is_none(tmp_path: Path) -> None:
    changes = {
        "sliding_window": 128,
        "use_sliding_window": False,
        "layer_types": ["full_attention"],
    }
    check_own_drafts(options("draft_model", write_draft_model(tmp_path, changes)))


def test_files_that_are_wrong_are_refused(tmp_path: Path) -> None:
    whole = write_draft_model(tmp_path / "ints", dtype=torch.int8)
    with pytest.raises(UsageError, match=r"I8; weights .* F32, BF16, F16"):
        check_own_drafts(options("draft_model", whole))
    check_own_drafts(options("draft_model", write_draft_model(tmp_path / "h", dtype=torch.half)))
    (whole / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"--vllm-speculative-config: model .*model\.safetensors"):
        check_own_drafts(options("draft_model", whole))


def fits(draft_options: dict[str, Any], engine: EngineLayout, tokenizer: Path, spec: Any) -> None:
    draft = draft_model_of(draft_options)
    assert draft is not None
    check_draft_model(draft, spec, engine, str(tokenizer))


@pytest.mark.parametrize(
    ("changes", "engine", "case", "named"),
    [
        ({"vocab_size": 500}, EngineLayout(1, 1), GQA, "500 tokens, the policy's"),
        (FITS, EngineLayout(2, 1, dp=2), GQA, "--rollout-dp 2"),
        (FITS, EngineLayout(4, 4), GQA, "--rollout-tp 4 does not divide its 6"),
        (FITS, EngineLayout(3, 3), GQA, "--rollout-tp 3 and its 2 heads of keys and values"),
        (FITS, EngineLayout(1, 1), LATENT, "latent attention"),
    ],
)
def test_models_for_other_policies_and_engines_are_refused(
    changes: dict[str, Any], engine: EngineLayout, case: Any, named: str, tmp_path: Path
) -> None:
    given = options("draft_model", write_draft_model(tmp_path, changes))
    with pytest.raises(UsageError, match=f"--vllm-speculative-config: draft_model.*{named}"):
        fits(given, engine, tmp_path, spec_of(case))


def test_a_drafting_model_is_cut_like_the_policy(tmp_path: Path) -> None:
    folder = write_draft_model(tmp_path, FITS)
    given = options("draft_model", folder, draft_tensor_parallel_size=2)
    fits(given, EngineLayout(2, 2), tmp_path, SPEC)
    with pytest.raises(UsageError, match=r"draft_tensor_parallel_size is 2, .* --rollout-tp 1"):
        fits(given, EngineLayout(1, 1), tmp_path, SPEC)


def test_a_head_is_for_hidden_states_of_one_size(tmp_path: Path) -> None:
    head = write_eagle_head(tmp_path, "eagle", hidden=128, vocab=SPEC.vocab_size)
    assert SPEC.hidden_size != 128
    with pytest.raises(UsageError, match=f"hidden_size is 128.*{SPEC.hidden_size} channels"):
        fits(options("eagle", head), EngineLayout(1, 1), tmp_path, SPEC)


def test_an_id_that_stands_for_another_token_is_refused(tmp_path: Path) -> None:
    """One that only one of the two knows is none; without a tokenizer.json nothing is known."""
    engine = EngineLayout(1, 1)
    policy = write_draft_model(tmp_path / "policy", FITS, tokens={"a": 0, "b": 1, "c": 2})
    fewer = write_draft_model(tmp_path / "fewer", FITS, tokens={"a": 0, "b": 1, "d": 7})
    fits(options("draft_model", fewer), engine, policy, SPEC)
    other = write_draft_model(tmp_path / "other", FITS, tokens={"a": 0, "c": 1, "b": 2})
    with pytest.raises(UsageError, match=r"token 1 is 'c' .* and 'b' in .*policy"):
        fits(options("draft_model", other), engine, policy, SPEC)
    fits(options("draft_model", other), engine, tmp_path / "fewer" / "none", SPEC)


@pytest.mark.parametrize(
    "damaged",
    ['{"model": {"vocab": {"a": "0"}}}', '{"model": {"vocab": {"a": [0]}}}', "[" * 100_000, "7"],
)
def test_a_damaged_tokenizer_is_named(damaged: str, tmp_path: Path) -> None:
    policy = write_draft_model(tmp_path / "policy", FITS, tokens={"a": 0})
    other = write_draft_model(tmp_path / "other", FITS, tokens={"a": 0})
    (other / "tokenizer.json").write_text(damaged)
    with pytest.raises(UsageError, match=r"other/tokenizer\.json: no tokenizer"):
        fits(options("draft_model", other), EngineLayout(1, 1), policy, SPEC)


def test_platforms_that_draft_from_models(tmp_path: Path) -> None:
    flags = speculation("draft_model", write_draft_model(tmp_path))
    config: RLRunConfig = parse(RLRunConfig, ["--hf-checkpoint", "x", *flags], "x").config
    for platform in ("cpu", "cuda"):
        check_drafts(config, platform)
    with pytest.raises(UsageError, match="on CPU and CUDA only, this is npu"):
        check_drafts(config, "npu")
