"""Takes the experts that vLLM-Ascend's routers chose from what it returns with a request.

Its runner copies the choice of every layer out of a step, and vLLM's scheduler puts the steps of a
request together, those of a prompt that was cached included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ARGUMENTS = {"enable_return_routed_experts": True}
# The name under which a layer with experts has the recorder of the runner.
_CAPTURER = "_ascend_routed_experts_capturer"


class ReturnedExperts:
    """The experts that vLLM-Ascend returns with a finished request, as an ``ExpertSource``.

    Args:
        llm: An engine that was built with :data:`ARGUMENTS`.
        layers: Numbers of the layers with experts.

    Raises:
        RuntimeError: A layer records nothing; its experts would be zeros.
    """

    def __init__(self, llm: Any, layers: Sequence[int]) -> None:
        self._layers = list(layers)
        modules = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        known = {m.layer_id for m in modules if getattr(m, _CAPTURER, None) is not None}
        if missing := sorted(set(layers) - known):
            raise RuntimeError(f"vLLM-Ascend does not record the experts of layers {missing}")

    def clear(self) -> None:
        """Nothing is kept here: vLLM forgets a request when it is finished or aborted."""

    def take(self, name: str, output: Any, first: int, count: int) -> bytes:
        rows = output.routed_experts  # numpy, [tokens, layers, k]
        known = 0 if rows is None else len(rows)
        if known < first + count:
            raise RuntimeError(
                f"routed experts: the engine returned those of {known} tokens of request {name}, "
                f"{first + count} are needed"
            )
        return bytes(rows[first : first + count, self._layers].tobytes())
