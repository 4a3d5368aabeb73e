"""The adapters of a model on one rank: parameters, merged weights, and how modules get them.

A module that computes with a weight W sees W + s B A in its place for the time of its forward pass,
as a tensor that autograd knows. Its backward pass gives the gradient of that sum, from which the
chain rule gives those of A and B. No code of the module changes, so fused projections, cuts of
tensor parallelism and experts need nothing of their own, and the trainer computes with the very
bits that the engine gets. The sum is not kept between forward and backward pass: it is made again.

Shapes: W [out, in], A [r, in], B [out, r]. Every rank of a tensor-parallel group holds all of A
and B, and the gradients of its part of W contribute to them: these are summed over the group.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

from mindspeed_rl.adapters.plan import (
    MODULE,
    AdaptedParam,
    AdapterPlan,
    factor_name,
    plan_adapters,
)
from mindspeed_rl.algorithms.lora import LoraSettings
from mindspeed_rl.checkpoint.compatibility import BASE
from mindspeed_rl.weight_layouts.megatron import MegatronLayout, chunk_prefix
from mindspeed_rl.weights.verify import source_digest

_EXPERTS = ".experts."
# The weights of MindSpeed's TEGroupedLinear, and their transposes in its latest pass.
_LISTED, _TRANSPOSED = "total_weight", "total_weight_T"
# Merged weights that are kept while one after another is read.
_KEPT_BYTES = 256 << 20


class AdapterModule(torch.nn.Module):
    """The factors A and B of the adapters of one chunk, as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: dict[str, torch.nn.Parameter] = {}

    def add(self, name: str, values: torch.Tensor) -> torch.nn.Parameter:
        """Make a parameter of values, under a name of :func:`factor_name`."""
        parameter = torch.nn.Parameter(values)
        self.factors[name] = parameter
        self.register_parameter(name.replace(".", "/"), parameter)
        return parameter

    def sharded_state_dict(self) -> dict[str, ShardedTensor]:
        """Return the factors and which ranks hold the same ones, for a checkpoint. Local.

        A tensor is named after its HF tensor, so another layout finds it.
        """
        return {
            name.replace(".", "/"): ShardedTensor.from_rank_offsets(
                f"{MODULE}.{name}", parameter, replica_id=_replica(name)
            )
            for name, parameter in self.factors.items()
        }


def _replica(name: str) -> tuple[int, int, int]:
    """Return a number that only one of the ranks with the same factor has as zeros."""
    if _EXPERTS in name and parallel_state.get_expert_model_parallel_world_size() > 1:
        cut = parallel_state.get_expert_tensor_parallel_rank()
        return 0, cut, parallel_state.get_expert_data_parallel_rank()
    copies = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return 0, parallel_state.get_tensor_model_parallel_rank(), copies


def first_factors(
    hf_name: str, shape: tuple[int, int], rank: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [r, in] and B [out, r] of a new adapter, fp32 on the host. Pure.

    A is uniform within 1 / sqrt(in), as PEFT and ``torch.nn.Linear`` have it; B is 0, so the model
    is that of the base. Both depend on nothing but the name and the seed.
    """
    rows, columns = shape
    digest = hashlib.sha256(f"{seed} {hf_name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    bound = 1.0 / math.sqrt(columns)
    first = torch.empty(rank, columns).uniform_(-bound, bound, generator=generator)
    return first, torch.zeros(rows, rank)


class Adapters:
    """All adapters of a model on this rank.

    Args:
        modules: Chunks of the model, with their weights' shapes; all of these get frozen.
        layout: Layout of the trainer.
        lora: Flags; adapters are on.
        seed: Seed of the first values.
    """

    def __init__(
        self, modules: Sequence[Any], layout: MegatronLayout, lora: LoraSettings, seed: int
    ) -> None:
        self.lora = lora
        self.layout = layout
        self.plan: AdapterPlan = plan_adapters(layout, dist.get_rank(), lora)
        self.is_on = True
        self._modules: list[AdapterModule] = []
        self._base: dict[str, torch.nn.Parameter] = {}
        self._factors: dict[str, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
        self._order = {name: _row_order(param) for name, param in self.plan.params.items()}
        self._digest = ""
        for chunk, module in enumerate(modules):
            self._attach(module, chunk_prefix(chunk, len(modules)), seed)

    def _attach(self, module: Any, prefix: str, seed: int) -> None:
        """Freeze a chunk, add its adapters, and let its modules compute with merged weights."""
        module.requires_grad_(False)
        adapters = AdapterModule()
        for path, owner in list(module.named_modules()):
            names = {}
            for attribute, weight in owner.named_parameters(recurse=False):
                name = prefix + (f"{path}.{attribute}" if path else attribute)
                if name in self.plan.params:
                    self._base[name] = weight
                    self._build(adapters, self.plan.params[name], weight, seed)
                    names[attribute] = name
            if names:
                owner.forward = with_merged(owner, owner.forward, self, names)
        module.add_module(MODULE, adapters)
        self._modules.append(adapters)
        if hasattr(module, "embedding"):
            # A recomputed layer has gradients only if its input asks for one.
            module.embedding.register_forward_hook(_asks_for_gradient)

    def _build(
        self, adapters: AdapterModule, param: AdaptedParam, weight: torch.Tensor, seed: int
    ) -> None:
        if _cut_group(param.name).size() > 1 and self.plan.is_copied(param.name):
            # Only then has each rank a part of the gradient, so that the sum of all is the whole.
            assert getattr(weight, "sequence_parallel", False), param.name
        for hf_name in param.tensors:
            values = first_factors(hf_name, self.plan.shapes[hf_name], self.lora.lora_rank, seed)
            made = []
            for factor, value in zip("AB", values, strict=True):
                like = value.to(device=weight.device, dtype=weight.dtype)
                made.append(adapters.add(factor_name(hf_name, factor), like))
                _mark(made[-1], weight, _EXPERTS in param.name)
            self._factors[hf_name] = (made[0], made[1])

    @property
    def modules(self) -> Sequence[AdapterModule]:
        """The factors, chunk by chunk."""
        return self._modules

    @property
    def factors(self) -> Mapping[str, tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """A and B of this rank by the name of the HF tensor."""
        return self._factors

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the model compute with the weights of the base. Local."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    def __contains__(self, name: str) -> bool:
        """Whether a parameter of the layout has adapters."""
        return name in self._base

    def merged(self, name: str) -> torch.Tensor:
        """Return W + s B A of a parameter in its precision, summed in fp32. Local.

        With gradients enabled those of the sum flow to A and B; the backward pass is then
        collective over the tensor-parallel group, that of the experts for an expert.
        """
        param, weight = self.plan.params[name], self._base[name]
        factors = self._whole_factors(param)
        order, rank = self._order[name], self.lora.lora_rank
        low, high = param.columns
        wide = torch.cat([factors[hf_name][0][:, low:high] for hf_name in param.tensors])
        blocks = []
        for run_name, first, count in order:
            parts = []
            for hf_name in param.tensors:
                own = hf_name == run_name
                rows = factors[hf_name][1][first : first + count]
                parts.append(rows if own else rows.new_zeros(count, rank))
            blocks.append(torch.cat(parts, 1))
        tall = torch.cat(blocks)
        total = torch.addmm(weight.float(), tall, wide, alpha=self.lora.scale)
        return total.to(weight.dtype)

    def _whole_factors(self, param: AdaptedParam) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return A and B of the HF tensors of a parameter, fp32, with one sum of gradients."""
        names = param.tensors
        factors = [factor.float() for name in names for factor in self._factors[name]]
        group = _cut_group(param.name)
        if group.size() > 1 and torch.is_grad_enabled():
            flat = torch.cat([factor.flatten() for factor in factors])
            flat = copy_to_tensor_model_parallel_region(flat, group=group)
            parts = flat.split([factor.numel() for factor in factors])
            factors = [p.view(f.shape) for p, f in zip(parts, factors, strict=True)]
        return {name: (factors[2 * i], factors[2 * i + 1]) for i, name in enumerate(names)}

    def host_tensors(self) -> dict[str, torch.Tensor]:
        """Return copies on the host of the factors of which this rank is the first holder."""
        return {
            name: parameter.detach().to("cpu", copy=True)
            for module in self._modules
            for name, parameter in module.factors.items()
            if not any(_replica(name))
        }

    def identity(self, base: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return what a checkpoint says of these adapters, as JSON has it.

        Collective: the world, the first time. Weights of the base never change.

        Args:
            base: Weights of the base by name, on the device.
        """
        if not self._digest:
            dtype = next(iter(self._base.values())).dtype
            self._digest = source_digest(self.layout, dist.get_rank(), base, dtype)
        found = asdict(self.lora) | {
            "lora_target": [*self.lora.layers_among(self.layout.hf_shapes)]
        }
        return {**found, BASE: self._digest}


def _row_order(param: AdaptedParam) -> tuple[tuple[str, int, int], ...]:
    return tuple((run.hf_name, run.first, run.count) for run in param.runs)


def _cut_group(param: str) -> dist.ProcessGroup:
    """Return the group over which the module of a parameter is cut."""
    if _EXPERTS in param:
        found = parallel_state.get_expert_tensor_parallel_group()
    else:
        found = parallel_state.get_tensor_model_parallel_group()
    group: dist.ProcessGroup = found
    return group


def _mark(factor: torch.nn.Parameter, weight: torch.Tensor, is_expert: bool) -> None:
    """Tell megatron-core whose gradients are summed with a factor's, and who counts its norm.

    It counts a parameter that is marked on every rank, another one only on the first rank of the
    tensor-parallel group, and none that is marked as shared. Experts are spread over the ranks of
    that group.
    """
    marked: Any = factor
    marked.allreduce = getattr(weight, "allreduce", True)
    if is_expert and not marked.allreduce:
        if parallel_state.get_expert_tensor_parallel_rank() == 0:
            marked.tensor_model_parallel = True
        else:
            marked.shared = True


def _asks_for_gradient(module: Any, inputs: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def with_merged(
    module: Any, forward: Callable[..., Any], adapters: Adapters, names: Mapping[str, str]
) -> Callable[..., Any]:
    """Return the forward pass of a module with merged weights in place of its own.

    An attribute of the instance hides the parameter of the same name. What autograd saves of a
    merged weight is replaced by how to make it again. MindSpeed's experts are read from lists of
    the module, one of which it would keep until the next pass, with the merged weights in it.
    """
    listed = list(getattr(module, _LISTED, ()))

    def run(*args: Any, **kwargs: Any) -> Any:
        if not adapters.is_on:
            return forward(*args, **kwargs)
        merged = {attribute: adapters.merged(name) for attribute, name in names.items()}
        place = {m.untyped_storage().data_ptr(): names[a] for a, m in merged.items()}

        def pack(saved: torch.Tensor) -> Any:
            name = place.get(saved.untyped_storage().data_ptr())
            if name is None:
                return saved
            return name, saved.size(), saved.stride(), saved.storage_offset()

        def unpack(kept: Any) -> torch.Tensor:
            if isinstance(kept, torch.Tensor):
                return kept
            name, *view = kept
            with torch.no_grad():
                return adapters.merged(name).as_strided(*view)

        hidden: dict[str, Any] = dict(merged)
        if listed:
            hidden[_LISTED] = [merged.get(f"weight{i}", w) for i, w in enumerate(listed)]
        module.__dict__.update(hidden)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return forward(*args, **kwargs)
        finally:
            for attribute in merged:
                del module.__dict__[attribute]
            if listed:
                module.__dict__.update({_LISTED: listed, _TRANSPOSED: None})

    return run


class MergedWeights(Mapping[str, torch.Tensor]):
    """The weights of a model with its adapters merged in, made when they are asked for. Local.

    Args:
        base: Weights of the base by name.
        adapters: Adapters; they may not change while this object is used.
    """

    def __init__(self, base: Mapping[str, torch.Tensor], adapters: Adapters) -> None:
        self._base = base
        self._adapters = adapters
        self._made: OrderedDict[str, torch.Tensor] = OrderedDict()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._adapters:
            return self._base[name]
        if name not in self._made:
            with torch.no_grad():
                self._made[name] = self._adapters.merged(name)
            while len(self._made) > 1 and sum(t.nbytes for t in self._made.values()) > _KEPT_BYTES:
                self._made.popitem(last=False)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)
