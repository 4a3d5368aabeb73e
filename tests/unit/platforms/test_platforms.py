"""One platform per process, and what megatron.core alone sees of a tensor on a CPU."""

from __future__ import annotations

import types

import pytest
import torch

from mindspeed_rl.platforms import cpu_install, registry

CALLER = """
def facts(tensor):
    return tensor.type(), tensor.cuda() is tensor
"""


def test_a_process_has_one_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_CURRENT", [])
    first = registry.select_platform("cpu")
    assert registry.select_platform("cpu") is first
    with pytest.raises(RuntimeError, match="platform cuda: this process"):
        registry.select_platform("cuda")
    monkeypatch.setattr(registry, "_sees", lambda name: name == "npu")
    with pytest.raises(RuntimeError, match="platform npu: this process"):
        registry.select_platform("auto")


def test_only_megatron_core_takes_a_host_tensor_for_one_of_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("type", "cuda"):  # are put back after the test
        monkeypatch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
    cpu_install._patch_tensor_methods()
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    inside = types.ModuleType("megatron.core.planted")
    exec(CALLER, vars(inside))
    assert inside.facts(tensor) == ("torch.cuda.BFloat16Tensor", True)
    assert tensor.type() == "torch.BFloat16Tensor"
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
            tensor.cuda()
