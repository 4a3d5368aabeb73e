"""The guide to adding a family, executed: its file in a package path, its test row on a model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from check_mapping import check_layout, check_tensors, tensor_shapes
from support.architecture import ROOT
from support.family_models import FAMILY_CASES, FamilyCase, write_family_model

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.models import families, registry
from mindspeed_rl.models.layers import DenseMLP, GroupedQueryAttention, LayerSpec
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.rope import RopeSpec
from mindspeed_rl.models.spec import ModelSpec, read_hf_config
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

GUIDE = ROOT / "docs/adding_a_family.md"
FILE, ROW = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.fixture
def mistral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FamilyCase]:
    """The guide's file where the registry looks, and the guide's row."""
    name = re.match(r"# mindspeed_rl/models/families/(\w+)\.py\n", FILE)
    assert name, "the first line of the guide's file is its path"
    package = tmp_path / "families"
    package.mkdir()
    (package / f"{name[1]}.py").write_text(FILE)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(package)])
    registry._families.cache_clear()
    yield eval(ROW, {"FamilyCase": FamilyCase})
    sys.modules.pop(f"{families.__name__}.{name[1]}", None)
    registry._families.cache_clear()


def test_the_file_is_the_whole_family(mistral: FamilyCase, tmp_path: Path) -> None:
    """transformers' tiny Mistral: spec, every tensor, every element in several layouts."""
    assert mistral.name not in FAMILY_CASES
    folder = write_family_model(mistral, tmp_path / "model")
    spec = spec_from_hf_config(read_hf_config(folder))
    assert spec == ModelSpec(
        family="mistral",
        layers=(LayerSpec(GroupedQueryAttention(4, 2, 8), DenseMLP(48)),) * 4,
        hidden_size=32,
        intermediate_size=48,
        vocab_size=67,
        norm_eps=1e-6,
        rope=RopeSpec(1e4),
        max_position_embeddings=128,
        tie_embeddings=False,
        eos_token_ids=(1,),
    )
    assert check_tensors(spec, tensor_shapes(folder)) == []
    grid = ParallelLayout.build(world=8, stages=even_stages(4, 2, 2), tp=2)
    assert check_layout(MegatronLayout(spec, grid, 8)) == []
    assert check_layout(VllmLayout(spec, EngineLayout(8, 4))) == []


def test_what_the_file_does_not_compute_is_refused(mistral: FamilyCase, tmp_path: Path) -> None:
    folder = write_family_model(mistral, tmp_path / "model")
    config = read_hf_config(folder) | {"sliding_window": 4096}
    with pytest.raises(UsageError, match="sliding_window"):
        spec_from_hf_config(config)
