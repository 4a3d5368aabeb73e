"""Random numbers of requests in vLLM-Ascend's real engine on emulated NPUs.

A generator of the emulator moves by 12 per draw, as torch_npu's does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ascend import engine_worlds, sampling_worlds
from ascend.npu_ranks import run_npu_ranks

pytestmark = pytest.mark.ascend_emul


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    import make_tiny_model

    root = tmp_path_factory.mktemp("sampling")
    return str(make_tiny_model.write_tiny_model(root / "qwen2", family="qwen2", seed=0))


@pytest.mark.parametrize("ours", [True, False])
def test_tokens_do_not_depend_on_how_prompts_are_cut(
    ours: bool, folder: str, tmp_path: Path
) -> None:
    """With the engine's own sampler they do, which is why it is patched."""
    world = sampling_worlds.read_in_parts
    ((together, alone),) = run_npu_ranks(world, 1, work_dir=tmp_path, args=(folder, ours))
    assert set(together) == set(alone) == set(range(len(engine_worlds.PROMPTS)))
    same = {i for i in alone if together[i][0] == alone[i][0]}
    assert (same == set(alone)) == ours, same


@pytest.mark.parametrize(
    ("family", "room"),
    [("qwen2", sampling_worlds.ROOM), ("qwen2", 256), ("qwen3_moe", 256)],
)
def test_drafts_change_no_token(family: str, room: int, tmp_path: Path) -> None:
    """In vLLM-Ascend's runner with our drafter, and its sampler of drafts with our verification.

    In the smaller room steps read prompts in parts, beside drafts that are cut.
    """
    import make_tiny_model

    folder = str(make_tiny_model.write_tiny_model(tmp_path / family, family=family, seed=0))
    (plain, steps), (drafted, fewer) = (
        run_npu_ranks(
            sampling_worlds.twice, 1, work_dir=tmp_path / str(drafts), args=(folder, drafts, room)
        )[0]
        for drafts in (False, True)
    )
    assert plain[0] == plain[1], "the second pass is known"
    for one, other in zip(plain, drafted, strict=True):
        assert {i: tokens for i, (tokens, _) in other.items()} == {
            i: tokens for i, (tokens, _) in one.items()
        }
        for i, (_, logprobs) in one.items():
            assert other[i][1] == pytest.approx(logprobs, abs=2e-5)
    assert steps[1].kept_tokens == 0 and fewer[1].kept_tokens > 0
    assert fewer[1].steps < (0.4 if room > sampling_worlds.ROOM else 1.0) * steps[1].steps


def test_the_kernels_of_sampling_do_not_grow_with_the_batch(folder: str, tmp_path: Path) -> None:
    """In a decode step of 2 and of 8 requests; with its own sampler each has its draw."""
    world = sampling_worlds.operators_of_a_step
    counts = {}
    for ours in (True, False):
        args = (folder, (2, 8), ours)
        (counts[ours],) = run_npu_ranks(world, 1, work_dir=tmp_path / str(ours), args=args)
    few, many = counts[True]
    assert few == many and few.total() > 50
    assert not any(call.operator == "aten::exponential" for call in few)
    (draw,) = {call for call in counts[False][0] if call.operator == "aten::exponential"}
    few, many = counts[False]
    assert many - few == {draw: 6}, "one per request, of about seven kernels each"
