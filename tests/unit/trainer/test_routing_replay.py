"""Replayed routing in megatron-core's own top-k: first experts, weights of now."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import listed_stages
from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.metrics.metric_set import Mean
from mindspeed_rl.samples.packing import pack
from mindspeed_rl.trainer.routing_replay import (
    AGREEMENT,
    ENGINE_AGREEMENT,
    Routes,
    RoutingReplay,
    router_places,
    routes_of,
)

TOKENS, EXPERTS, TOP_K = 12, 8, 2
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax-before": {"use_pre_softmax": True},
    "sigmoid-with-bias": {"score_function": "sigmoid", "expert_bias": torch.linspace(-1, 1, 8)},
    "groups": {
        "score_function": "sigmoid",
        "expert_bias": torch.linspace(1, -1, 8),
        "num_groups": 4,
        "group_topk": 1,
        "scaling_factor": 2.5,
    },
}


class Router(torch.nn.Module):
    """The part of megatron-core's router that chooses experts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, 6))
        self.router_replay: Any = None
        self.kind = kind

    def routing(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

        result: tuple[torch.Tensor, torch.Tensor] = topk_routing_with_score_function(
            logits, TOP_K, router_replay=self.router_replay, **KINDS[self.kind]
        )
        return result

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.routing(x @ self.weight.t())


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def twins(kind: str = "softmax") -> tuple[Router, Router]:
    """Two routers with equal weights."""
    router, plain = Router(kind), Router(kind)
    plain.load_state_dict(router.state_dict())
    return router, plain


def drift(router: Router, size: float = 1.0) -> None:
    """An update of its weights."""
    with torch.no_grad():
        router.weight += size * torch.randn_like(router.weight)


def places(mask: torch.Tensor) -> torch.Tensor:
    return mask.nonzero()[:, 0]


def routes() -> Routes:
    return Routes(torch.arange(TOKENS))


def agreement(replay: RoutingReplay) -> float:
    metric = replay.metrics()[AGREEMENT]
    assert isinstance(metric, Mean)
    return metric.value


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_the_first_pass_with_the_weights_of_now(kind: str) -> None:
    router, plain = twins(kind)
    replay = RoutingReplay([torch.nn.ModuleList([router])])
    x = torch.randn(TOKENS, 6)
    replay.current = kept = routes()
    with torch.no_grad():
        probs, chosen = router(x)
    assert torch.equal(probs, plain(x)[0]) and torch.equal(chosen, plain(x)[1])
    assert kept.experts[0].dtype == torch.uint8
    drift(router)
    plain.load_state_dict(router.state_dict())
    present = plain(x)[1]
    assert not torch.equal(present, chosen), "the drift must change the choice"
    with replay.update():
        probs, again = router(x)
        (probs.square().sum()).backward()
    assert torch.equal(again, chosen)
    gradient = router.weight.grad
    assert gradient is not None and float(gradient.abs().sum()) > 0
    expected = (present & chosen).sum() / chosen.sum()
    assert agreement(replay) == pytest.approx(float(expected))
    # the weights of these experts are those that scores of now give them, and nobody else's
    scores = (x @ router.weight.t()).detach()
    if kind == "softmax":
        masked = scores.masked_fill(~chosen, float("-inf")).softmax(-1)
        torch.testing.assert_close(probs.detach(), masked)
    if kind == "groups":
        weight = scores.sigmoid() * chosen
        torch.testing.assert_close(probs.detach(), 2.5 * weight / weight.sum(-1, keepdim=True))


def test_recomputed_layers_take_the_experts_of_their_own_micro_batch() -> None:
    """One forward, one backward, with a forward of the next micro-batch in between."""
    router = Router("softmax")
    replay = RoutingReplay([torch.nn.ModuleList([router])])
    batches = [torch.randn(TOKENS, 6, requires_grad=True) for _ in range(3)]
    kept = [routes() for _ in batches]
    wanted = []
    for x, route in zip(batches, kept, strict=True):
        replay.current = route
        with torch.no_grad():
            wanted.append(router(x)[1])
    assert not torch.equal(wanted[0], wanted[1])
    drift(router)
    seen: list[torch.Tensor] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        probs, chosen = router(x)
        seen.append(chosen)
        return probs

    def forward(i: int) -> torch.Tensor:
        replay.current = kept[i]
        result: Callable[..., Any] = checkpoint
        out: torch.Tensor = result(layer, batches[i], use_reentrant=True)
        return out.square().sum()

    with replay.update():
        first, second = forward(0), forward(1)
        first.backward()  # type: ignore[no-untyped-call]
        third = forward(2)
        second.backward()  # type: ignore[no-untyped-call]
        third.backward()  # type: ignore[no-untyped-call]
    for chosen, i in zip(seen, (0, 1, 0, 2, 1, 2), strict=True):
        assert torch.equal(chosen, wanted[i])
    counted, after_reading = agreement(replay), agreement(replay)
    assert 0 < counted < 1
    assert math.isnan(after_reading), "reading it starts the count again"


def test_the_first_update_records_for_those_after_it() -> None:
    """On-policy there is no pass before the first update; its recomputation replays already."""
    router = Router("softmax")
    replay = RoutingReplay([torch.nn.ModuleList([router])])
    x, kept = torch.randn(TOKENS, 6, requires_grad=True), routes()
    for size in (0.0, 1.0):
        drift(router, size)
        replay.current = kept
        with replay.update():
            out: Any = checkpoint(lambda x: router(x)[0], x, use_reentrant=True)
            recorded = kept.experts[0].clone()
            out.square().sum().backward()
        if size:
            assert torch.equal(kept.experts[0], recorded)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_pass_takes_the_experts_of_the_engine(kind: str) -> None:
    """At the counted places, with the router's own weights for them; its own experts elsewhere."""
    router, plain = twins(kind)
    replay = RoutingReplay([torch.nn.ModuleList([router])], places=[1])
    x, counted = torch.randn(TOKENS, 6), torch.arange(TOKENS) % 3 != 0
    own = plain(x)[1]
    # what an engine with a little other weights would choose; another layer's ids are in the way
    ids = own.nonzero()[:, 1].view(TOKENS, TOP_K).clone()
    ids[1, 0] = next(e for e in range(EXPERTS) if not own[1, e])
    given = torch.stack([torch.full_like(ids, 7), ids], 1)[counted].to(torch.uint8)
    replay.current = kept = Routes(places(counted), given)
    probs, chosen = router(x)
    wanted = torch.zeros_like(own).scatter_(1, ids, True)
    assert torch.equal(chosen, wanted) and not torch.equal(chosen, own)
    assert torch.equal(kept.experts[0].long().sort(1)[0], ids.sort(1)[0])
    probs[counted].square().sum().backward()
    gradient = router.weight.grad
    assert gradient is not None and float(gradient.abs().sum()) > 0
    with replay.update():
        router(x)
    found = replay.metrics()
    engine, later = found[ENGINE_AGREEMENT], found[AGREEMENT]
    assert isinstance(engine, Mean) and isinstance(later, Mean)
    number = int(counted.sum()) * TOP_K
    assert (engine.sum, engine.weight) == (number - 1, number)
    assert later.value == engine.value, "of the recorded ones, which are the engine's"


def test_trained_tokens_without_the_experts_of_the_engine_are_no_choice_of_the_router() -> None:
    router = Router("softmax")
    replay = RoutingReplay([torch.nn.ModuleList([router])], places=[0])
    x, counted = torch.randn(TOKENS, 6), torch.zeros(TOKENS, dtype=torch.bool)
    replay.current = Routes(places(counted))
    router(x)  # nothing of it is trained
    counted[3] = True
    replay.current = Routes(places(counted))
    with pytest.raises(AssertionError, match="experts"):
        router(x)


def test_each_rank_gives_its_routers_their_tokens_and_layers() -> None:
    """A share of a packed row; the layers of a stage with two chunks and a dense layer."""
    samples = [
        TrainSample(
            i, torch.arange(n), 2, {"experts": torch.arange((n - 2) * 6).view(-1, 6) + 50 * i}
        )
        for i, n in enumerate((5, 4))
    ]
    row = pack(samples, 12)
    assert row.columns["experts"].shape == (5, 6) and row.columns["experts"][3, 0] == 50
    for half in range(2):
        part = routes_of(row, range(6 * half, 6 * half + 6), 3)
        assert part.counted.tolist() == places(row.loss_mask.chunk(2)[half]).tolist()
        assert part.given is not None and part.given.shape == (len(part.counted), 3, 2)
    assert part.given[0].flatten().tolist() == [50, 51, 52, 53, 54, 55]
    plain = pack([TrainSample(0, torch.arange(5), 2)], 8)
    assert routes_of(plain, range(8), 3).given is None
    with pytest.raises(AssertionError, match=r"6 experts.* 4 layers"):
        routes_of(row, range(12), 4)
    spec = SimpleNamespace(expert_layers=(1, 2, 3, 4, 5, 6, 7))
    stages = listed_stages(8, 2, (3, 1, 2, 2))
    parallel = ParallelLayout.build(world=2, stages=stages)
    layout: Any = SimpleNamespace(spec=spec, parallel=parallel)
    assert [router_places(layout, rank) for rank in (0, 1)] == [(0, 1, 3, 4), (2, 5, 6)]


def test_without_routes_nothing_changes() -> None:
    router, plain = twins()
    RoutingReplay([torch.nn.ModuleList([router])])
    x = torch.randn(TOKENS, 6)
    assert all(torch.equal(a, b) for a, b in zip(router(x), plain(x), strict=True))


def test_experts_are_compared_without_replay() -> None:
    """Also where layers are recomputed; nothing that is computed changes."""
    router, plain = twins()
    replay = RoutingReplay([torch.nn.ModuleList([router])], replays=False)
    x, kept = torch.randn(TOKENS, 6, requires_grad=True), routes()
    replay.current = kept
    with torch.no_grad():
        _, chosen = router(x)
    drift(router)
    plain.load_state_dict(router.state_dict())
    with replay.update():
        out: Any = checkpoint(lambda x: router(x)[0], x, use_reentrant=True)
        out.square().sum().backward()
    expected, present = plain(x)
    assert torch.equal(out, expected)
    expected.square().sum().backward()
    torch.testing.assert_close(router.weight.grad, plain.weight.grad)
    assert agreement(replay) == pytest.approx(float((present & chosen).sum() / chosen.sum()))


def test_a_router_that_does_not_ask_is_refused() -> None:
    """One that replaces megatron-core's may not know of replay; silence would look like success."""
    router = Router("softmax")
    replay = RoutingReplay([torch.nn.ModuleList([router])])
    router.router_replay = None
    with pytest.raises(RuntimeError, match=r"\[0\]"), replay.update():
        router(torch.randn(TOKENS, 6))
    watching = RoutingReplay([torch.nn.ModuleList([router])], replays=False)
    router.router_replay = None
    with watching.update():
        router(torch.randn(TOKENS, 6))


PADDING = torch.tensor([1, 2, 5])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["free", "compare", "replay"])
def test_padding_goes_to_all_experts_in_turn(kind: str, mode: str) -> None:
    """In every pass, also where layers are recomputed; tokens keep their experts and weights."""
    router, plain = twins(kind)
    replay = RoutingReplay(
        [torch.nn.ModuleList([router])],
        replays=mode == "replay",
        records=mode != "free",
        first=EXPERTS - 1,
    )
    x = torch.randn(TOKENS, 6, requires_grad=True)
    real = torch.ones(TOKENS, dtype=torch.bool)
    real[PADDING] = False
    numbers = torch.full((TOKENS,), -1)
    numbers[PADDING] = torch.arange(len(PADDING))
    replay.current = Routes(places(real), padding=numbers)
    for grad in (False, True):
        with replay.update() if grad else nullcontext(), torch.set_grad_enabled(grad):
            probs, chosen = router(x)
        assert torch.equal(chosen[real], plain(x)[1][real])
        torch.testing.assert_close(probs[real], plain(x)[0][real])
        turn = EXPERTS - 1
        for place in PADDING.tolist():
            taken = {(turn + i) % EXPERTS for i in range(TOP_K)}
            assert set(chosen[place].nonzero()[:, 0].tolist()) == taken
            turn += TOP_K
    assert bool(replay.metrics()) == (mode != "free")
