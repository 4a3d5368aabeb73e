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
from mindspeed_rl.parallel.small_collectives import gather_objects

_BACKEND, _VERSION, _FILES = "torch_dist", 1, 2


class _Planner(TorchDistSaveShardedStrategy):
    """Keeps what megatron-core would write, instead of writing it."""

    planned: tuple[Any, Any] | None = None

    def _get_save_and_finalize_callbacks(self, writer: Any, plan: Any) -> AsyncRequest:
        _, metadata, _ = plan
        self.planned = (writer, metadata)
        return AsyncRequest(None, (), [])


class SavePlans(FullyParallelSaveStrategyWrapper):
    """What the saves of a model share: which rank of the group ``replicas`` writes which part.

    It is agreed on, and checked to be the whole of the model, when the tensors of any rank have
    other names, shapes or places than at the save before; megatron-core does both at every save.
    """

    def __init__(self, replicas: dist.ProcessGroup) -> None:
        planner = _Planner(_BACKEND, _VERSION, thread_count=_FILES)
        super().__init__(planner, replicas, do_cache_distribution=True)
        self._structure: list[Any] = []

    def apply_saving_parallelization(self, sharded_state_dict: Any) -> None:
        structure = [place.without_data() for _, place in leaves(sharded_state_dict)]
        if not all(gather_objects(structure == self._structure)):
            self.cached_distribution = None
        self._structure = structure
        super().apply_saving_parallelization(sharded_state_dict)


class PlannedSave(RankFiles):
    """The part of a folder of tensors that this rank writes; a ``checkpoint.saving.Part``.

    Args:
        state: Tensors of this rank and their places in the model, as megatron-core takes them.
        folder: Folder that is written into; what has no place in the model is written already.
        plans: What the saves of this model share.
        shards: Tensors that no other rank has, which megatron-core does not plan.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        folder: Path,
        plans: SavePlans,
        shards: Sequence[OptimizerShard] = (),
    ) -> None:
        # Without a queue the plan starts a process for one, which outlives a killed rank.
        filesystem_async._results_queue = queue.Queue()
        live = [getattr(place, "data", None) for _, place in leaves(state)]
        dist_checkpointing.save(
            dict(state),
            str(folder),
            plans,
            validate_access_integrity=False,  # see `SavePlans`
            async_sharded_save=True,
        )
        self._writer, self._metadata = plans.base_strategy.planned
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
