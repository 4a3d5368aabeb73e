"""Models that vLLM-Ascend 0.23.0 builds itself have the parameters that our tables say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.family_models import FAMILY_CASES, write_family_model

from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.vllm.capabilities import CAPABILITIES
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.models.registry import spec_from_hf_config

pytestmark = [pytest.mark.ascend_emul, pytest.mark.slow]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """By case: the checkpoint, and what was built from it; all in one process."""
    root = tmp_path_factory.mktemp("models")
    # groups of experts are made with the first model
    names = sorted(FAMILY_CASES, key=lambda name: not FAMILY_CASES[name].experts)
    folders = {name: write_family_model(FAMILY_CASES[name], root / name) for name in names}
    command = [sys.executable, "-W", "ignore", "-m", "ascend.built_models"]
    done = subprocess.run(
        [*command, *map(str, folders.values())], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("BUILT")]
    found = json.loads(line.removeprefix("BUILT"))
    return {name: (folder, found[str(folder)]) for name, folder in folders.items()}


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_names_and_shapes_are_those_of_the_table(
    name: str, built: dict[str, tuple[Path, Any]]
) -> None:
    """As built, so experts are as their loaders want them; router biases stay in fp32."""
    folder, model = built[name]
    spec = spec_from_hf_config(json.loads((folder / "config.json").read_text()))
    row = CAPABILITIES["npu"]
    layout = VllmLayout(
        spec, EngineLayout(1, 1), transposed_experts=row.transposed_experts,
        expert_module=row.expert_module,
    )  # fmt: skip
    found = {}
    for param, (shape, dtype) in model["parameters"].items():
        expert = param.endswith(("w13_weight", "w2_weight"))
        found[param] = (shape[0], shape[2], shape[1]) if expert else tuple(shape)
        assert dtype == ("torch.float32" if "correction_bias" in param else "torch.bfloat16"), param
    assert found == dict(layout.local_shapes(0))
    assert len(found) >= 27 and model["class"].endswith("ForCausalLM")
