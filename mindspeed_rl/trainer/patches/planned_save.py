"""Takes from megatron-core the plan of a save, and leaves the writing to this project.

Why: megatron-core writes the files in processes that it forks from the rank, which copies the page
tables of all its memory and takes the locks of other threads along, and it makes no checksums.
What it plans is kept: which rank writes which part of which tensor, the names of files, the index.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mindspeed_rl.checkpoint.finite import leaves
from mindspeed_rl.checkpoint.optimizer_shards import OptimizerShard, index_of
from mindspeed_rl.checkpoint.tensor_files import RankFiles, split_results

_BACKEND, _VERSION, _FILES = "torch_dist", 1, 2


class _Planner(TorchDistSaveShardedStrategy):
    """Keeps what megatron-core would write, instead of writing it."""

    planned: tuple[Any, Any] | None = None

    def _get_save_and_finalize_callbacks(self, writer: Any, plan: Any) -> AsyncRequest:
        _, metadata, _ = plan
        self.planned = (writer, metadata)
        return AsyncRequest(None, (), [])


class PlannedSave(RankFiles):
    """The part of a folder of tensors that this rank writes; a ``checkpoint.saving.Part``.

    Args:
        state: Tensors of this rank and their places in the model, as megatron-core takes them.
        folder: Folder that is written into; what has no place in the model is written already.
        replicas: Group of ranks with the same weights; each writes a part of them.
        shards: Tensors that no other rank has, which megatron-core does not plan.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        folder: Path,
        replicas: dist.ProcessGroup,
        shards: Sequence[OptimizerShard] = (),
    ) -> None:
        # Without a queue the plan starts a process for one, which outlives a killed rank.
        filesystem_async._results_queue = queue.Queue()
        planner = _Planner(_BACKEND, _VERSION, thread_count=_FILES)
        strategy = FullyParallelSaveStrategyWrapper(planner, replicas)
        live = [getattr(place, "data", None) for _, place in leaves(state)]
        dist_checkpointing.save(dict(state), str(folder), strategy, async_sharded_save=True)
        assert planner.planned is not None
        self._writer, self._metadata = planner.planned
        planned = {
            name: [*objects, *tensors]
            for _, name, (objects, tensors) in self._writer.write_buckets or ()
        }
        self._writer.write_buckets = None
        names = [f"__{dist.get_rank()}_{number}.distcp" for number in range(_FILES)]
        # Of weights on the host, megatron-core has made copies.
        super().__init__(folder, {name: [] for name in names} | planned, shards, live, _StorageInfo)

    def finish(self, results: list[list[Any]]) -> None:
        """Write the index of tensors, on rank 0, from the results of all ranks.

        Raises:
            OSError: A tensor is not whole.
        """
        entries, shards = split_results(results)
        self._metadata.state_dict_metadata |= index_of(shards, TensorStorageMetadata)
        self._writer.finish(self._metadata, entries)
        save_config(CheckpointingConfig(_BACKEND, _VERSION), str(self.folder))


def states_of(optimizer: Any, param: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return master weight and moments of the range of a parameter that this rank owns."""
    states: Mapping[str, torch.Tensor] = optimizer._get_main_param_and_optimizer_states(param)
    return states
