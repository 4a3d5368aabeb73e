"""A micro-batch's passes wait for nothing of the device, and keep nothing beyond their step."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.family_models import FAMILY_CASES, VOCAB, write_family_model
from support.spawn import run_ranks
from support.training_worlds import Case, make_loss, make_samples, start_job

from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.launch.bootstrap import World

FLAGS = (
    "--micro-batch-size",
    "2",
    "--max-tokens-per-micro-batch",
    "0",
    "--make-vocab-size-divisible-by",
    "8",
)
#: Waits that are known: function -> why it waits.
KNOWN = {
    "moe_utils": "megatron-core's permutation by a mask",
    "rerun_state_machine": "whether a gradient is NaN, once in an optimizer step and buffer",
}


@dataclass(frozen=True, slots=True)
class Found:
    """What a rank saw: waits of a pass by operator and place, and rows alive at moments of it."""

    waits: Counter[tuple[str, str, str]]
    alive: dict[str, int]
    num_micro_batches: int


def waits_world(world: World, model: str, loss: str, experts: bool) -> Found:
    """Rank function: two optimizer steps are prepared, and the first one runs both passes."""
    from support.batches import local_batches
    from support.waits import Waits

    from mindspeed_rl.building.models import build_engine
    from mindspeed_rl.trainer import train_engine

    routing = ("--rl-routing-replay", "trainer") if experts else ()
    job = start_job(world, model, (*FLAGS, *routing))
    engine = build_engine(job, "policy", 2, 1.0)
    rows: list[Any] = []
    make, waits = train_engine.make_packed_row, Waits()

    def kept(*args: Any) -> Any:
        waits.counts = False  # borders are found on the host
        row = make(*args)
        waits.counts = True
        rows.append(weakref.ref(row.blocks[0].queries))
        return row

    def alive() -> int:
        gc.collect()
        return sum(row() is not None for row in rows)

    samples = [masked(s) for s in make_samples(VOCAB)]
    counts: dict[str, int] = {}
    with mock.patch.object(train_engine, "make_packed_row", kept):
        steps = [local_batches(job, engine, samples) for _ in range(2)]
        counts["prepared"] = alive()
        case = Case("waits", loss=loss)
        compute = make_loss(case, samples, [])

        def watched(inputs: Any) -> Any:
            counts["in the pass"] = alive()
            return compute(inputs)

        with waits:
            engine.logprobs(steps[0])
            counts["after a pass"] = alive()
            engine.forward_backward(steps[0], watched)
        counts["after the step"] = alive()
    return Found(waits.found, counts, len(steps[0]))


def masked(sample: TrainSample) -> TrainSample:
    """The same with a token that is not trained on in the middle, as an environment writes it."""
    behind = sample.length - sample.num_prompt_tokens
    mask = torch.arange(behind) != behind // 2
    columns = {name: values[mask] for name, values in sample.columns.items()}
    return TrainSample(
        sample.sample_id, sample.token_ids, sample.num_prompt_tokens, columns, loss_mask=mask
    )


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3-moe"])
def test_passes_wait_for_known_reasons_only_and_borders_live_for_a_pass(
    family: str, tmp_path: Path
) -> None:
    model = str(write_family_model(FAMILY_CASES[family], tmp_path / "model"))
    experts = FAMILY_CASES[family].experts
    (found,) = run_ranks(waits_world, 1, work_dir=tmp_path, args=(model, "on-policy", experts))
    unknown = {place: n for place, n in found.waits.items() if not known(place)}
    assert not unknown
    assert found.num_micro_batches > 1
    assert found.alive == {
        "prepared": 0,
        "in the pass": found.num_micro_batches,
        "after a pass": 0,
        "after the step": 0,
    }


def known(place: tuple[str, str, str]) -> bool:
    return any(f"{name}.py" in place[1] for name in KNOWN)
