"""vLLM looks at the class of a model in the process of the rank."""

from __future__ import annotations

import subprocess
from dataclasses import asdict

import pytest

from mindspeed_rl.vllm_patches import model_inspection


@pytest.mark.slow  # it imports vLLM
def test_no_process_is_started_to_look_at_a_class(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """What is found is what vLLM finds of the class itself; its cache is empty."""
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    model_inspection.apply()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", refuse)
    entry = registry._LazyRegisteredModel("vllm.model_executor.models.qwen2", "Qwen2ForCausalLM")
    found = asdict(entry.inspect_model_cls())
    assert found == asdict(registry._ModelInfo.from_model_cls(Qwen2ForCausalLM))
    assert found["architecture"] == "Qwen2ForCausalLM" and found["is_text_generation_model"]
    assert found["supports_pp"] and not found["supports_multimodal"]
