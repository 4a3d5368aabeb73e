"""The kind of engine of a run: whoever needs it asks here and knows no engine by name."""

from __future__ import annotations

from mindspeed_rl.rollout.provider import EngineProvider
from mindspeed_rl.rollout.vllm.provider import VllmProvider


def engine_provider() -> EngineProvider:
    """vLLM, which is vLLM-Ascend on NPUs. A flag that chooses among several is read here."""
    return VllmProvider()
