"""Routing replay: later passes over a micro-batch take the experts of its first one (R12).

Between the pass that gives the old log-probs and a later update the router's scores move a little,
some tokens change experts, and their ratios jump although the policy hardly changed. The replayed
experts are those of the recording pass; their weights come from the present scores, so gradients
reach the router (Zheng et al. 2025, arXiv:2507.18071, section 5.3).

Shapes: t tokens of a micro-batch on this rank (of its context-parallel and, with sequence
parallelism, tensor-parallel share), k experts per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed_rl.observability.metrics import Mean, MetricSet

AGREEMENT = "routing/agreement"


class Routes:
    """The experts of one micro-batch on this rank, layer by layer, as the first pass chose them.

    Args:
        counted: [t] bool, tokens that the agreement is measured on.
    """

    def __init__(self, counted: torch.Tensor) -> None:
        self.counted = counted
        #: number of the router -> [t, k] ids, uint8 or int16
        self.experts: dict[int, torch.Tensor] = {}


class RoutingReplay:
    """The routers of a model on this rank.

    A recomputed layer runs twice: without gradients, and again in the backward pass, when other
    micro-batches may have come in between. Each router therefore queues the routes of its
    gradient-free calls; backward passes come in the order of the forward passes.

    Args:
        modules: the chunks of the model.
        replays: whether later passes take the recorded experts; else they are only compared.
    """

    def __init__(self, modules: Sequence[Any], *, replays: bool = True) -> None:
        routers = [layer for m in modules for layer in m.modules() if hasattr(layer, "routing")]
        self.current: Routes | None = None
        self.replays = replays
        self.in_update = False
        self._tapes = [_Tape(self, number) for number in range(len(routers))]
        for router, tape in zip(routers, self._tapes, strict=True):
            router.router_replay = tape

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around forward and backward passes of an optimizer step. Local.

        Raises:
            RuntimeError: a router was not asked for its experts, so nothing of it is replayed: an
                implementation of its own took the place of megatron-core's.
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
        """Share of the recorded experts that the router would choose now, since the last call."""
        agreed = sum(tape.agreed for tape in self._tapes)
        compared = sum(tape.compared for tape in self._tapes)
        for tape in self._tapes:
            tape.agreed, tape.compared = 0.0, 0.0
        return MetricSet({AGREEMENT: Mean(float(agreed), float(compared))})


class _Tape:
    """What megatron-core asks for the experts of a layer."""

    def __init__(self, replay: RoutingReplay, number: int) -> None:
        self._replay = replay
        self.number = number
        self.asked = False
        self.waiting: deque[Routes] = deque()
        self.agreed: float | torch.Tensor = 0.0
        self.compared: float | torch.Tensor = 0.0

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [t, experts] -> (scores, ids) of the chosen experts, [t, k] each."""
        assert default_compute_topk is not None
        self.asked = True
        choose = default_compute_topk
        again = torch.is_grad_enabled() and bool(self.waiting)
        routes = self.waiting.popleft() if again else self._replay.current
        if routes is None:
            return choose(scores, topk, num_groups, group_topk)
        if self._replay.in_update and not torch.is_grad_enabled():
            self.waiting.append(routes)
        known = routes.experts.get(self.number)
        if known is None:
            found, ids = choose(scores, topk, num_groups, group_topk)
            narrow = torch.uint8 if scores.size(1) <= 256 else torch.int16
            routes.experts[self.number] = ids.to(narrow)
            return found, ids
        ids, replays = known.long(), self._replay.replays
        found, present = scores, ids
        if not (again and replays):
            given = scores.detach() if replays else scores
            found, present = choose(given, topk, num_groups, group_topk)
        if not again:
            self._compare(ids[routes.counted], present[routes.counted])
        return (scores.gather(1, ids), ids) if replays else (found, present)

    def _compare(self, recorded: torch.Tensor, present: torch.Tensor) -> None:
        hits = (recorded[:, :, None] == present[:, None, :]).any(2)
        self.agreed = self.agreed + hits.sum()
        self.compared = self.compared + float(hits.numel())
