"""Chooses the kind of engine of a run, so that other rooms know no engine by name."""

from __future__ import annotations

from mindspeed_rl.engines.vllm.provider import VllmProvider
from mindspeed_rl.rollout.provider import EngineProvider


def engine_provider() -> EngineProvider:
    """Return the provider of vLLM, which also stands for vLLM-Ascend on NPUs."""
    return VllmProvider()
