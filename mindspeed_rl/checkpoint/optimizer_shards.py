"""Takes what a rank owns of a distributed optimizer, where it lies, for a checkpoint of any layout.

megatron-core's format ``fully_reshardable`` keeps the state of every parameter in the shape of the
parameter. megatron-core gathers the state over data parallelism to write it; here each rank writes
the boxes of those tensors that its own ranges are, and nothing is sent or copied. What is on the
disk is read by megatron-core's load of that format.

The optimizer and the places of parameters are megatron-core's objects, which this room does not
import; only what is named here is used of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mindspeed_rl.checkpoint.finite import leaves
from mindspeed_rl.checkpoint.flat_ranges import boxes

#: A part of a tensor: its place in the whole, and its values.
OptimizerShard = tuple[WriteItem, torch.Tensor]
#: A distributed optimizer and a parameter -> the states of the range that this rank owns.
StatesOf = Callable[[Any, torch.Tensor], Mapping[str, torch.Tensor]]
_STATES = ("param", "exp_avg", "exp_avg_sq")
#: The format on the disk.
FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}
# A format that has the same parts beside the tensors, and the method that gives those. With the
# format on the disk megatron-core would collect garbage, which takes longer than all else.
_ASKED, _METHOD = "fully_sharded_model_space", "sharded_param_state_fs_model_space"
_TYPE = "param_state_sharding_type"


def sharded_state(
    optimizer: Any, model_state: Mapping[str, Any], states_of: StatesOf
) -> tuple[dict[Any, Any], list[OptimizerShard]]:
    """Return what megatron-core saves of an optimizer, and this rank's part of its states. Local.

    Where an optimizer is not distributed, its states are in the former, and there are no shards.

    Args:
        optimizer: A megatron-core optimizer, which may be chained; its states exist.
        model_state: Parameters of the models and their places, as megatron-core gives them.
        states_of: Returns the states of a parameter, which a part of the optimizer has.

    Returns:
        The state for megatron-core to save, without tensors that are sharded by data parallelism,
        and those shards; they refer to the live state.
    """
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    shards: list[OptimizerShard] = []
    with ExitStack() as stack:
        for number, part in enumerate(chained):
            if hasattr(part, _METHOD):
                prefix = f"chained_{number}." if len(chained) > 1 else ""
                stack.enter_context(_collected(part, prefix, shards, states_of))
        state = optimizer.sharded_state_dict(
            model_state, is_loading=False, metadata={"distrib_optim_sharding_type": _ASKED}
        )
    for part in [state, *state.values()]:
        if isinstance(part, dict) and _TYPE in part:
            part |= {_TYPE: FORMAT["distrib_optim_sharding_type"]}
    return state, shards


@contextmanager
def _collected(
    optimizer: Any, prefix: str, shards: list[OptimizerShard], states_of: StatesOf
) -> Iterator[None]:
    """Let an optimizer append its shards to a list, in this block, instead of its own ones."""

    def collect(model_state: Mapping[str, Any], *_: Any) -> dict[int, Any]:
        shards.extend(_shards_of(optimizer, model_state, prefix, states_of))
        return {}

    setattr(optimizer, _METHOD, collect)
    try:
        yield
    finally:
        delattr(optimizer, _METHOD)


def _shards_of(
    optimizer: Any, model_state: Mapping[str, Any], prefix: str, states_of: StatesOf
) -> Iterator[OptimizerShard]:
    """Yield the shards of the states of every parameter of which this rank owns a range."""
    places = {
        id(place.data): place
        for _, place in leaves(model_state)
        if isinstance(getattr(place, "data", None), torch.Tensor)
    }
    for of_dtypes in optimizer.gbuf_ranges:
        for buckets in of_dtypes.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    states = states_of(optimizer, param)
                    for name in _STATES:
                        values, place = states[name].detach(), places[id(param)]
                        key = f"{prefix}optimizer.state.{name}.{place.key}"
                        yield from shards_of_range(place, key, values, ranges["param"].start)


def shards_of_range(
    place: Any, key: str, values: torch.Tensor, start: int
) -> Iterator[OptimizerShard]:
    """Yield the shards of one parameter's state, unless another rank writes the same ones.

    Args:
        place: A ``ShardedTensor`` of megatron-core with the parameter, or the factory of several.
        key: Name of the tensor in the checkpoint.
        values: [count], fp32, the state of the elements ``start`` to ``start + count`` of the
            parameter, flat.
        start: First element of the range.

    Raises:
        NotImplementedError: The model keeps the parameter in another order than its own.
    """
    whole = torch.empty(place.data.shape, dtype=values.dtype, device="meta")
    found = [(place, whole)]
    if hasattr(place, "build"):  # a factory, which cuts the parameter into tensors
        parts = leaves(replace(place, key=key, data=whole).build())
        found = [(part, part.data) for _, part in parts]
    for part, view in found:
        if view.untyped_storage() is not whole.untyped_storage():
            raise NotImplementedError(f"{key}: megatron-core copies the parameter to save it")
        if any(part.replica_id[:-1]):  # the same range of another tensor or pipeline rank
            continue
        name = key if part is place else part.key
        low = start - int(view.storage_offset())
        for box in boxes(view.shape, view.stride(), low, low + values.numel()):
            behind = box.position(view.stride()) - low
            content = values.as_strided(
                (*(1 for _ in range(part.prepend_axis_num)), *box.sizes),
                (*(1 for _ in range(part.prepend_axis_num)), *view.stride()),
                int(values.storage_offset()) + behind,
            )
            offsets = (*(0 for _ in range(part.prepend_axis_num)), *box.offsets)
            yield _item(name, part, offsets, content), content


def _item(name: str, place: Any, offsets: tuple[int, ...], content: torch.Tensor) -> WriteItem:
    at = torch.Size(map(sum, zip(place.global_offset, offsets, strict=True)))
    return WriteItem(
        index=MetadataIndex(name, at),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(at, content.shape),
            properties=TensorProperties(dtype=content.dtype),
            size=torch.Size(place.global_shape),
        ),
    )


def index_of(items: list[WriteItem], make: Callable[..., Any]) -> dict[str, Any]:
    """Return the entries of an index of tensors from the shards of all ranks.

    Args:
        items: Shards of all ranks.
        make: Makes an entry of properties, shape and chunks.

    Raises:
        OSError: The shards of a tensor are not the whole of it; the message names it.
    """
    chunks: dict[str, dict[Any, ChunkStorageMetadata]] = {}
    first: dict[str, TensorWriteData] = {}
    for item in items:
        data = item.tensor_data
        assert data is not None, item
        first.setdefault(item.index.fqn, data)
        chunks.setdefault(item.index.fqn, {})[data.chunk.offsets] = data.chunk
    for name, data in first.items():
        held = sum(prod(chunk.sizes) for chunk in chunks[name].values())
        if held != prod(data.size):
            raise OSError(f"the ranks hold {held} of the {prod(data.size)} values of {name}")
    return {
        name: make(data.properties, data.size, list(chunks[name].values()))
        for name, data in first.items()
    }
