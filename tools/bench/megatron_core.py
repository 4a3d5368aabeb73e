"""megatron.core.resharding as a way of the benchmark, from one trainer layout to another.

Its planner and executor run unchanged on modules that carry what they read of a model: parameters
under megatron-core's names with their tensor-parallel attributes, layer numbers, process groups.
Its own gloo copy service makes a CUDA stream, so on hosts without CUDA the wire is this file's: the
same batch of isend and irecv, counted. Its plan knows no engine: only trainer layouts meet it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.strategies import Setting, Traffic
from mindspeed_rl.parallel.groups import rank_lists
from mindspeed_rl.resharding.layouts.base import pieces_of
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout


class CountedPeerCopies:
    """The copy service that ``megatron.core.resharding`` asks for: point to point over gloo."""

    def __init__(self) -> None:
        self.received_bytes = 0
        self.sent_bytes = 0
        self._sends: list[tuple[int, torch.Tensor, int]] = []
        self._receives: list[tuple[int, torch.Tensor, int]] = []

    def submit_send_with_id(self, task_id: int, src_tensor: torch.Tensor, dest_rank: int) -> None:
        """Note a message to a rank."""
        self._sends.append((task_id, src_tensor, dest_rank))

    def submit_recv_with_id(self, task_id: int, dest_tensor: torch.Tensor, src_rank: int) -> None:
        """Note a message from a rank."""
        self._receives.append((task_id, dest_tensor, src_rank))

    def run(self) -> None:
        """Move all that was noted. Collective over the ranks that are named."""
        rank, wire = dist.get_rank(), []
        own = {task: tensor for task, tensor, peer in self._sends if peer == rank}
        for task, tensor, peer in self._receives:
            if peer == rank:
                tensor.copy_(own[task])
            else:
                wire.append(dist.P2POp(dist.irecv, tensor, peer))
                self.received_bytes += tensor.numel() * tensor.element_size()
        for _, tensor, peer in self._sends:
            if peer != rank:
                wire.append(dist.P2POp(dist.isend, tensor, peer))
                self.sent_bytes += tensor.numel() * tensor.element_size()
        for work in dist.batch_isend_irecv(wire) if wire else ():
            work.wait()
        self._sends.clear()
        self._receives.clear()


class MegatronCoreReshard:
    """``megatron.core.resharding.reshard_model_weights``; its plan is made at the first run.

    Raises:
        ImportError: megatron-core, or this part of it, is not installed.
    """

    def __init__(self, setting: Setting) -> None:
        from megatron.core.resharding import reshard_model_weights

        model = setting.model
        assert isinstance(model.target, MegatronLayout)
        self._reshard = reshard_model_weights
        self._service = CountedPeerCopies()
        self._source = as_module(model.source, model.rank, model.read)
        self._target = as_module(model.target, model.rank, model.write)

    def run(self) -> None:
        """Reshard once. Collective: the world."""
        self._reshard(self._source, self._target, service=self._service)

    def traffic(self) -> Traffic:
        """Counted in the copy service since the beginning."""
        return Traffic(self._service.received_bytes, self._service.sent_bytes)


def as_module(layout: MegatronLayout, rank: int, params: Mapping[str, torch.Tensor]) -> nn.Module:
    """A tree of modules that holds a rank's parameters as a model does. Collective: the world."""
    root = nn.Module()
    root.config = SimpleNamespace(num_moe_experts=None)  # type: ignore[assignment]
    root.pg_collection = _groups(layout, rank)
    stage = layout.parallel.coords(rank).pp
    layers = layout.parallel.stages.layers_of(stage)
    dims = split_dims(layout, rank)
    for name, tensor in params.items():
        *path, leaf = name.split(".")
        module = root
        for depth, part in enumerate(path):
            if part not in module._modules:
                child = nn.Module()
                if part.isdigit() and path[depth - 1] == "layers":
                    child.layer_number = layers[int(part)] + 1  # type: ignore[assignment]
                module.add_module(part, child)
            module = module.get_submodule(part)
        param = nn.Parameter(tensor, requires_grad=False)
        if name in dims:
            param.tensor_model_parallel = True  # type: ignore[attr-defined]
            param.partition_dim = dims[name]  # type: ignore[attr-defined]
            # gate and up are cut each for itself and stacked
            param.partition_stride = 2 if "linear_fc1" in name else 1  # type: ignore[attr-defined]
        module.register_parameter(leaf, param)
    return root


def split_dims(layout: MegatronLayout, rank: int) -> dict[str, int]:
    """The dimension along which tensor parallelism cuts each cut parameter of a rank."""
    dims = {}
    for shard in pieces_of(layout, rank):
        whole, box = layout.hf_shapes[shard.piece.hf_name], shard.piece.hf_box
        cut = [d for d, (a, b) in enumerate(zip(whole, box.size, strict=True)) if a != b]
        if cut and layout.parallel.tp > 1:
            dims[shard.piece.param] = cut[0]
    return dims


def _groups(layout: MegatronLayout, rank: int) -> Any:
    """Process groups by megatron-core's names, also those of a single rank. Collective."""
    found = {}
    for axis, lists in rank_lists(layout.parallel).items():
        for ranks in lists if axis in ("tp", "dp", "pp") else ():
            handle = dist.new_group(ranks)
            if rank in ranks:
                found[axis] = handle
    return SimpleNamespace(**found)
