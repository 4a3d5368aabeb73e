"""Finds where numbers that are not finite begin: module, rank, forward or backward pass.

A gradient norm tells all ranks at once that there are such numbers somewhere. The same
micro-batches then run again with a hook on every module. A module is where they begin if all that
goes into it is finite and something that comes out is not; of those that several ranks find, the
earliest in the order of the computation is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_rl.algorithms.types import LossOutputs
from mindspeed_rl.core.ranks import rank_ranges
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.samples.packing import MicroBatch

if TYPE_CHECKING:
    from mindspeed_rl.trainer.train_engine import TrainEngine

_LAST = 1 << 30  # a place behind all modules


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """Where numbers that are not finite begin on one rank; the smallest is the earliest.

    Attributes:
        backward: Whether it is in the backward pass, which such numbers of a forward pass spoil.
        micro: Number of the micro-batch of a forward pass; 0 in a backward pass.
        part: Place of the chunk in the model; in a backward pass its negative.
        order: How many modules came before in the pass over the chunk.
        spread: 0 where the module's own weights are not finite, else 1: a collective inside of a
            module spreads what one rank has.
        where: Module and layer, or "the loss".
        text: What was seen there.
    """

    backward: bool
    micro: int
    part: int
    order: int
    spread: int
    where: str
    text: str


class NonFiniteTrace:
    """Watches the modules of a rank for the first numbers that are not finite.

    Args:
        chunks: The chunks of the model on this rank.
        parts: Place of each chunk in the whole model, from 0.
        is_last: Whether the last of them makes the loss.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], parts: Sequence[int], is_last: bool):
        self.found: Origin | None = None
        self._chunks, self._parts, self._is_last = chunks, parts, is_last
        self._micro = [-1] * len(chunks)
        self._order = 0
        self._spoiled = False  # the present forward pass
        self._ever_spoiled = False  # then gradients are spoiled by what went forward
        self._last_finite = ""  # module whose output had a finite gradient, in this backward pass

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all modules within the block."""
        with ExitStack() as stack:
            for number, chunk in enumerate(self._chunks):
                begin = partial(self._begin, number)
                stack.callback(chunk.register_forward_pre_hook(begin).remove)
                for name, module in chunk.named_modules():
                    see = partial(self._see, number, name)
                    hook = module.register_forward_hook(see, with_kwargs=True)
                    stack.callback(hook.remove)
            yield

    def _begin(self, number: int, module: torch.nn.Module, args: Any) -> None:
        self._micro[number] += 1
        self._order, self._spoiled = 0, False

    def _see(
        self, number: int, name: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        self._order += 1
        outputs = list(_floats(output))
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    partial(self._see_gradient, number, name)
                )
        if all(map(_finite, outputs)):
            return
        already, self._spoiled = self._spoiled, True
        self._ever_spoiled = True
        given = [*_floats(args), *_floats(kwargs)]
        if already or not all(map(_finite, given)):
            return
        owned = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        broken = [f"its {n} holds {_counts(p)}" for n, p in owned if not _finite(p)]
        bad = next(tensor for tensor in outputs if not _finite(tensor))
        seen = f"what goes in is finite, what comes out holds {_counts(bad)}"
        place, text = _place(self._chunks[number], name), "; ".join([seen, *broken])
        micro, part = self._micro[number], self._parts[number]
        self._keep(Origin(False, micro, part, self._order, int(not broken), place, text))

    def see_loss(self, inputs: Any, outputs: LossOutputs) -> None:
        """Look at what the loss function was given and returns."""
        if self._spoiled or _finite(outputs.loss):
            return
        self._spoiled = self._ever_spoiled = True
        given = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
        broken = [
            f"{n} holds {_counts(v)}"
            for n, v in given.items()
            if isinstance(v, torch.Tensor) and not _finite(v)
        ]
        seen = "; ".join(["the hidden states before it are finite", *broken])
        self._keep(Origin(False, self._micro[-1], self._parts[-1], _LAST, 1, "the loss", seen))

    def _see_gradient(self, number: int, name: str, gradient: torch.Tensor) -> None:
        if not name:  # the output of a chunk is the first to get a gradient
            self._order, self._last_finite = 0, ""
        self._order += 1
        here = _place(self._chunks[number], name)
        if _finite(gradient):
            self._last_finite = here
            return
        if self._ever_spoiled:
            return
        from_loss = self._is_last and number == len(self._chunks) - 1
        if not self._last_finite and not from_loss:
            return  # the next stage has sent it
        where = self._last_finite or "the loss"
        seen = f"the gradient that reaches {here} holds {_counts(gradient)}"
        self._keep(Origin(True, 0, -self._parts[number], self._order, 1, where, seen))

    def _keep(self, origin: Origin) -> None:
        if self.found is None or origin < self.found:
            self.found = origin


def trace_nonfinite(
    engine: TrainEngine, batches: Sequence[MicroBatch], loss: Callable[[Any], LossOutputs]
) -> str:
    """Run micro-batches again and say where numbers that are not finite begin.

    Collective: the training grid and the world. The gradients are those of the second pass.

    Args:
        engine: Engine whose gradient norm is not finite.
        batches: The micro-batches of the update.
        loss: Their loss function.
    """
    parallel, chunks = engine.layout.parallel, engine.modules
    stage = parallel.coords(dist.get_rank()).pp
    parts = [chunk * parallel.pp + stage for chunk in range(len(chunks))]
    trace = NonFiniteTrace(chunks, parts, engine.is_last_stage)

    def watched(inputs: Any) -> LossOutputs:
        outputs = loss(inputs)
        trace.see_loss(inputs, outputs)
        return outputs

    with trace.watching():
        engine.forward_backward(batches, watched)
    again = engine.gradient_norm()
    spoiled = [name for name, grad in engine.gradients().items() if not _finite(grad)]
    found = gather_objects((trace.found, spoiled[:3]))
    return description([origin for origin, _ in found], [names for _, names in found], again)


def description(
    origins: Sequence[Origin | None], gradients: Sequence[Sequence[str]], again: float
) -> str:
    """Say where numbers that are not finite begin.

    Args:
        origins: What each rank found in the second pass.
        gradients: Names of some weights of each rank whose gradients are not finite.
        again: Gradient norm of the second pass.
    """
    known = [(origin, rank) for rank, origin in enumerate(origins) if origin is not None]
    if known:
        first = min(origin for origin, _ in known)
        ranks = [rank for origin, rank in known if origin == first]
        kind = "backward pass" if first.backward else f"forward pass of micro-batch {first.micro}"
        return (
            f"numbers that are not finite begin on rank {rank_ranges(ranks)}, in the {kind}, in "
            f"{first.where}: {first.text}"
        )
    if math.isfinite(again):
        return (
            f"a second pass over the same micro-batches has a finite norm, {again:.3g}: the first "
            "one met an error of memory or device, or drew other random numbers"
        )
    ranks = [rank for rank, names in enumerate(gradients) if names]
    if ranks:
        return (
            "outputs and gradients of all modules are finite; the gradient of "
            f"{', '.join(gradients[ranks[0]])} on rank {rank_ranges(ranks)} is not: a product or "
            "sum of finite numbers is too large"
        )
    return "all gradients are finite, their squares are too large to be summed"


def require_finite(
    engine: TrainEngine, batches: Sequence[MicroBatch], loss: Callable[[Any], LossOutputs]
) -> None:
    """End the run before an update by gradients that are not finite. Collective as the trace.

    Raises:
        FloatingPointError: They are not; the message says where that begins.
    """
    norm = engine.gradient_norm()
    if not math.isfinite(norm):
        flag = "--critic-lr" if engine.role == "critic" else "--lr"
        raise FloatingPointError(
            f"{engine.role}: gradient norm {norm} before update "
            f"{engine.schedule.num_updates + 1}: {trace_nonfinite(engine, batches, loss)}; lower "
            f"{flag}, or look at the data of this step"
        )


def _floats(value: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors in arguments or results of a module."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.device.type != "meta":
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _floats(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _floats(one)


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _counts(tensor: torch.Tensor) -> str:
    nan, inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    return f"{nan} nan and {inf} inf of {tensor.numel()}"


def _place(chunk: torch.nn.Module, name: str) -> str:
    """Return a module's path, with the number of its layer in the whole model."""
    modules, parts = dict(chunk.named_modules()), name.split(".")
    for end in range(len(parts), 0, -1):
        number = getattr(modules[".".join(parts[:end])], "layer_number", None)
        if number is not None:
            return f"{name} (layer {number} of the model, counted from 1)"
    return name or "the whole chunk"
