"""Routing replay: later passes over a micro-batch take the experts of its first one.

Between the pass that gives the old log-probs and a later update the router's scores move a little,
some tokens change experts, and their ratios jump although the policy hardly changed. The replayed
experts are those of the recording pass; their weights come from the present scores, so gradients
reach the router (Zheng et al. 2025, arXiv:2507.18071, section 5.3).

If the engine reports its experts, the first pass takes them at the places that predict trained
tokens (Ma et al. 2025, arXiv:2510.11370), and its own at the others.

Padding is routed to all experts in turn, in every pass. All padding of a row has the same hidden
state in every layer, so the router would send all of it to the same experts, and the ranks that
have those would set the pace of all.

Shapes: t tokens of a micro-batch on this rank (of its context-parallel and, with sequence
parallelism, tensor-parallel part), k experts per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mindspeed_rl.metrics.metric_set import Mean, MetricSet
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

AGREEMENT = "routing/agreement"
ENGINE_AGREEMENT = "routing/engine_agreement"


class Routes:
    """The experts of one micro-batch on this rank, layer by layer, as the first pass chose them.

    Args:
        counted: [n] int64, the tokens on which the agreement is measured.
        given: [counted tokens, all layers with experts, k], the engine's experts of those tokens.
        padding: [t] int64, the number of a padding token, from 0 on, and -1 elsewhere; ``None``:
            there is none.
    """

    def __init__(
        self,
        counted: torch.Tensor,
        given: torch.Tensor | None = None,
        padding: torch.Tensor | None = None,
    ) -> None:
        self.counted = counted
        self.given = given
        self.padding = padding
        #: Expert ids [t, k] by number of the router, uint8 or int16.
        self.experts: dict[int, torch.Tensor] = {}


def routes_of(
    batch: MicroBatch,
    tokens: range,
    num_layers: int,
    padding: torch.Tensor | None = None,
) -> Routes:
    """Create the routes of a micro-batch before its first pass. Local.

    Args:
        batch: Micro-batch after the split over context-parallel ranks.
        tokens: Positions of the batch's row that are this rank's.
        num_layers: Number of layers with experts in the model.
        padding: [t] bool, which of this rank's tokens are padding; ``None``: none is.
    """
    if padding is not None:
        numbers = torch.where(padding, padding.cumsum(0) - 1, -1)
        padding = numbers.to(batch.trained.device)
    first, end = np.searchsorted(batch.trained_on_host, (tokens.start, tokens.stop)).tolist()
    counted = batch.trained[first:end].long() - tokens.start
    experts = batch.columns.get("experts")
    if experts is None:
        return Routes(counted, padding=padding)
    top_k, rest = divmod(experts.size(1), num_layers)
    assert not rest, f"{experts.size(1)} experts of a token in {num_layers} layers"
    return Routes(counted, experts[first:end].view(end - first, num_layers, top_k), padding)


def router_places(layout: MegatronLayout, rank: int) -> tuple[int, ...]:
    """Return for each router of a rank, in order, its layer's index among those with experts."""
    stages, stage = layout.parallel.stages, layout.parallel.coords(rank).pp
    place = {layer: number for number, layer in enumerate(layout.spec.expert_layers)}
    mine = (layer for chunk in range(stages.vpp) for layer in stages.layers_of(stage, chunk))
    return tuple(place[layer] for layer in mine if layer in place)


class RoutingReplay:
    """Records and replays the experts of a model's routers on this rank.

    A recomputed layer runs twice: without gradients, and again in the backward pass, possibly with
    other micro-batches in between. Each router therefore queues the routes of its gradient-free
    calls; backward passes come in the order of the forward passes.

    Args:
        modules: Chunks of the model.
        replays: Whether later passes take the recorded experts; otherwise they are only compared.
        places: Result of :func:`router_places`; needed if the engine gives the experts.
        records: Whether experts are recorded and compared at all; otherwise only padding is routed.
        first: Expert of the first padding token, different on every rank.
    """

    def __init__(
        self,
        modules: Sequence[Any],
        *,
        replays: bool = True,
        places: Sequence[int] = (),
        records: bool = True,
        first: int = 0,
    ) -> None:
        routers = [layer for m in modules for layer in m.modules() if hasattr(layer, "routing")]
        self.current: Routes | None = None
        self.replays = replays and records
        self.records = records
        self.first = first
        self.in_update = False
        self.places = tuple(places)
        assert not places or len(places) == len(routers), f"{len(routers)} routers at {places}"
        self._tapes = [_Tape(self, number) for number in range(len(routers))]
        for router, tape in zip(routers, self._tapes, strict=True):
            router.router_replay = tape

    @contextmanager
    def update(self) -> Iterator[None]:
        """Enclose the forward and backward passes of an optimizer step. Local.

        Raises:
            RuntimeError: A router did not ask for its experts, so nothing of it is replayed:
                another implementation has replaced megatron-core's.
        """
        self.in_update = True
        try:
            yield
        finally:
            self.in_update = False
            self.current = None
        left = [tape.number for tape in self._tapes if tape.waiting]
        assert not left, f"recomputed layers of routers {left} have not all run again"
        unheard = [tape.number for tape in self._tapes if not tape.asked]
        if unheard and self.replays:
            raise RuntimeError(
                f"--rl-routing-replay: routers {unheard} of this rank choose their experts without "
                "asking for recorded ones; remove the flag, or what replaces megatron-core's router"
            )

    def metrics(self) -> MetricSet:
        """Return the fractions of agreeing experts since the last call; empty without records.

        Of the recorded experts: those that the router would choose now. Of the engine's: those that
        it would have chosen in the first pass.
        """
        if not self.records:
            return MetricSet()
        metrics = MetricSet({AGREEMENT: _mean([tape.later for tape in self._tapes])})
        if self.places:
            metrics[ENGINE_AGREEMENT] = _mean([tape.engine for tape in self._tapes])
        return metrics


class _Count:
    """Counts how many experts of tokens would be chosen again; the count stays on the device."""

    def __init__(self) -> None:
        self.agreed: float | torch.Tensor = 0.0
        self.compared = 0.0

    def add(self, recorded: torch.Tensor, present: torch.Tensor) -> None:
        """Compare the ids [n, k] of the same tokens, in whatever order."""
        hits = (recorded[:, :, None] == present[:, None, :]).any(2)
        self.agreed = self.agreed + hits.sum()
        self.compared += float(hits.numel())


def _mean(counts: Sequence[_Count]) -> Mean:
    """Return the mean over several routers and reset their counts."""
    agreed = float(sum(count.agreed for count in counts))
    compared = sum(count.compared for count in counts)
    for count in counts:
        count.agreed, count.compared = 0.0, 0.0
    return Mean(agreed, compared)


class _Tape:
    """The object that megatron-core asks for the experts of one layer."""

    def __init__(self, replay: RoutingReplay, number: int) -> None:
        self._replay = replay
        self.number = number
        self.asked = False
        self.waiting: deque[Routes] = deque()
        self.later, self.engine = _Count(), _Count()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores, ids) of the chosen experts, [t, k] each, for scores [t, experts]."""
        assert default_compute_topk is not None
        self.asked = True
        choose = default_compute_topk
        again = torch.is_grad_enabled() and bool(self.waiting)
        routes = self.waiting.popleft() if again else self._replay.current
        if routes is None:
            return choose(scores, topk, num_groups, group_topk)
        if self._replay.in_update and not torch.is_grad_enabled():
            self.waiting.append(routes)
        if routes.padding is not None:
            choose = _spreading(choose, routes.padding, self._replay.first)
        if not self._replay.records:
            return choose(scores, topk, num_groups, group_topk)
        known = routes.experts.get(self.number)
        if known is None:
            found, ids = choose(scores, topk, num_groups, group_topk)
            if routes.given is None:
                lacks = bool(self._replay.places) and routes.counted.numel() > 0
                assert not lacks, "trained tokens came without the experts of the engine"
            else:
                theirs = routes.given[:, self._replay.places[self.number]].long()
                self.engine.add(theirs, ids.index_select(0, routes.counted))
                ids = ids.index_copy(0, routes.counted, theirs)
                found = scores.gather(1, ids)
            narrow = torch.uint8 if scores.size(1) <= 256 else torch.int16
            routes.experts[self.number] = ids.to(narrow)
            return found, ids
        ids, replays = known.long(), self._replay.replays
        found, present = scores, ids
        if not (again and replays):
            given = scores.detach() if replays else scores
            found, present = choose(given, topk, num_groups, group_topk)
        if not again:
            recorded = ids.index_select(0, routes.counted)
            self.later.add(recorded, present.index_select(0, routes.counted))
        return (scores.gather(1, ids), ids) if replays else (found, present)


def _spreading(
    choose: Callable[..., tuple[torch.Tensor, torch.Tensor]], padding: torch.Tensor, first: int
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return ``choose`` with the experts of padding taken in turn, from ``first`` on."""

    def spread(
        scores: torch.Tensor, topk: int, *groups: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found, ids = choose(scores, topk, *groups)
        number = padding.unsqueeze(-1)
        turn = torch.arange(first, first + topk, device=ids.device, dtype=ids.dtype)
        taken = (number * topk + turn) % scores.size(1)
        is_padding = number >= 0
        return (
            torch.where(is_padding, scores.gather(1, taken), found),
            torch.where(is_padding, taken, ids),
        )

    return spread
