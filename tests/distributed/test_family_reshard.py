"""Every family on eight ranks: three syncs, bit-equal to slices of the checkpoint.

Real megatron-core models and real messages; the engine is its declared layout. With a real engine:
``test_family_sync.py``.
"""

from __future__ import annotations

import pytest
from support.family_models import FAMILY_CASES, write_family_model
from support.family_reshard import BUCKET_BYTES, NUM_SYNCS, Moved, Rollout, family_reshard_world
from support.spawn import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WORLD = 8
_COMMON = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layer-list 1,3"
FLAGS = {
    "dense": _COMMON,
    "experts": f"{_COMMON} --sequence-parallel --expert-model-parallel-size 2 --moe-tp-extend-ep",
}
ROLLOUTS = {
    "dense": (Rollout(1), Rollout(2, transport="p2p"), Rollout(4, relay=True)),
    "experts": (
        Rollout(2, dp=2, whole_experts=True, whole_shared=True),
        Rollout(2, dp=2, whole_experts=True, transposed=True, relay=True),
        Rollout(4, multiple=32, transport="p2p"),
    ),
}
MODELS = {
    kind: [c.name for c in FAMILY_CASES.values() if c.experts is (kind != "dense")]
    for kind in FLAGS
}


@pytest.fixture(scope="module", params=FLAGS)
def moved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[dict[str, list[Moved]]]]:
    """Dense families or those with experts, and what every rank found."""
    kind: str = request.param
    folder = tmp_path_factory.mktemp(kind)
    models = {n: str(write_family_model(FAMILY_CASES[n], folder / n)) for n in MODELS[kind]}
    flags = [*FLAGS[kind].split(), "--make-vocab-size-divisible-by", "8"]
    args = (models, flags, ROLLOUTS[kind])
    return kind, run_ranks(family_reshard_world, WORLD, work_dir=folder, args=args)


def test_every_rank_holds_slices_of_the_checkpoint_after_every_sync(
    moved: tuple[str, list[dict[str, list[Moved]]]],
) -> None:
    kind, ranks = moved
    assert len(ranks) == WORLD
    for rank, models in enumerate(ranks):
        assert list(models) == MODELS[kind]
        for name, several in models.items():
            assert len(several) == len(ROLLOUTS[kind])
            for rollout, found in zip(ROLLOUTS[kind], several, strict=True):
                assert found.wrong == [[]] * NUM_SYNCS, (rank, name, rollout)
                assert found.num_params > 10 and found.num_rounds > 3, (rank, name, rollout)
                # the plans' digests come on top: the own one and everybody's
                said, peak = found.staging
                assert 0 < said <= peak <= said + (WORLD + 1) * 32, (rank, name, rollout)
                assert peak <= BUCKET_BYTES, (rank, name, rollout)
