"""The benchmark's baselines are no straw men: right bits, and exactly the bytes they claim.

Tiny models on four real ranks, every way after the other into the same engine weights.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from support.layout_arrays import Case, Latent
from support.layout_cases import layouts_of
from support.spawn import run_ranks

from mindspeed_rl.bootstrap import World

TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
if TOOLS not in sys.path:
    sys.path.insert(0, TOOLS)

from bench.cases import WAYS  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

_DENSE = Case(
    num_layers=3,
    hidden=12,
    ffn=16,
    kv_heads=2,
    heads_per_group=2,
    head_dim=4,
    vocab=50,
    tied=True,
    tp=2,
    pp=2,
    cp=1,
    dp=1,
    vocab_divisor=8,
    engine_tp=2,
    ranks_per_node=4,
    layer_list=(2, 1),
)
_MOE = replace(
    _DENSE,
    num_layers=2,
    layer_list=(),
    tied=False,
    experts=8,
    expert_ffn=8,
    moe_layers=(False, True),
    router_bias=True,
    shared_ffn=8,
    etp=1,
    ep=2,
    engine_dp=2,
    engine_ep=True,
)
CASES = {
    "dense, tied, uneven stages": _DENSE,
    "experts in one stage, whole engine EP": _MOE,
    "experts cut in trainer, not in engine": replace(_MOE, etp=2, ep=1),
    "experts cut in engine, not in trainer": replace(_MOE, engine_ep=False),
    "both cut, two replicas": replace(_MOE, pp=1, ep=2, etp=2, tp=4, kv_heads=4, engine_dp=1),
    "latent attention, no tensor parallelism": replace(
        _MOE,
        tp=1,
        dp=2,
        head_dim=0,
        kv_heads=4,
        heads_per_group=1,
        latent=Latent(3, 4, 2, 2, 2),
        moe_layers=(True, True),
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank saw of one way.

    Attributes:
        wrong: engine parameters that are not bit-equal to the slices.
        untouched: the same before anything ran.
        received: bytes counted in the transport.
        sent: the same.
        claimed_received: the closed form's; the floor for direct.
        claimed_sent: the closed form's; ``None`` where the planner decides.
    """

    wrong: list[str]
    untouched: list[str]
    received: int
    sent: int
    claimed_received: int
    claimed_sent: int | None


def bench_world(world: World, work_dir: str) -> dict[tuple[str, str], Outcome]:
    """Rank function: every case, every way, twice."""
    outcomes = {}
    for name, case in CASES.items():
        for strategy, outcome in bench_case(world, case, Path(work_dir)).items():
            outcomes[name, strategy] = outcome
    return outcomes


def bench_case(world: World, case: Case, folder: Path) -> dict[str, Outcome]:
    import torch.distributed as dist
    from bench import strategies as ways
    from bench.peer_volumes import stream_volumes
    from bench.staging import Model
    from bench.weights import HfWeights, differing, empty_params, load, refill
    from bench.wire import trainer_groups

    source, target = layouts_of(case)
    weights = HfWeights(source, torch.bfloat16, folder / "weights.bin")
    if world.rank == 0:
        weights.write(seed=1)
    dist.barrier()
    hf = {name: tensor.clone() for name, tensor in weights.map().items()}
    dist.barrier()
    read = empty_params(source, world.rank, torch.bfloat16, 0)
    write = empty_params(target, world.rank, torch.bfloat16, -1)
    load(source, world.rank, read, hf)
    model = Model(source, target, world.rank, torch.bfloat16, read, write)
    setting = ways.Setting(model, trainer_groups(source.parallel, world.rank), 4096)
    outcomes = {}
    for name, build in ways.STRATEGIES.items():
        strategy = build(setting)
        for _ in range(2):  # the second run reuses every buffer
            refill(write, -1)
            untouched = list(differing(target, world.rank, write, hf))
            before = strategy.traffic()
            strategy.run()
            wrong = list(differing(target, world.rank, write, hf))
            traffic = strategy.traffic().since(before)
        volumes = ways.closed_form(name, model)
        claimed_sent = volumes.send_bytes[world.rank] if volumes else None
        if name == "stream":
            volumes = stream_volumes(source, target, 2, setting.bucket_bytes)
        claimed = volumes.recv_bytes[world.rank] if volumes else ways.floor_bytes(model)
        outcomes[name] = Outcome(
            wrong, untouched, traffic.received_bytes, traffic.sent_bytes, claimed, claimed_sent
        )
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Outcome]]:
    folder = tmp_path_factory.mktemp("bench")
    return run_ranks(bench_world, 4, work_dir=folder, args=(str(folder),))


@pytest.mark.parametrize("strategy", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_every_way_gives_the_same_bits(
    case: str, strategy: str, outcomes: list[dict[tuple[str, str], Outcome]]
) -> None:
    """All of them write the whole engine, bit-equal to slices of the HF tensors."""
    for rank in outcomes:
        assert rank[case, strategy].untouched, "the check must see weights that nobody wrote"
        assert rank[case, strategy].wrong == []


@pytest.mark.parametrize("strategy", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_counted_bytes_are_the_closed_form(
    case: str, strategy: str, outcomes: list[dict[tuple[str, str], Outcome]]
) -> None:
    found = [rank[case, strategy] for rank in outcomes]
    assert [o.received for o in found] == [o.claimed_received for o in found]
    assert sum(o.sent for o in found) == sum(o.received for o in found)
    if strategy in ("gather", "two-stage"):
        assert [o.sent for o in found] == [o.claimed_sent for o in found]
