"""Engines of gloo ranks whose experts are in several places, or whose tokens are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from support.draft_world import SETTINGS, requests_of
from support.rollout_worlds import loaded_engine

from mindspeed_rl.core.types import Completion
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.rollout.requests import GenerationRequest
from mindspeed_rl.weight_layouts.rollout import Slots

FLAGS = ("--rollout-tp", "2", "--rollout-ep", "2")


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """What one rank sampled.

    Attributes:
        linear: with neighbouring experts on a rank.
        moved: the same requests, with other places in every layer.
        unaware: with weights in other places, of which the layers were not told.
        refused: error of moving experts outside an update.
    """

    linear: dict[int, Completion]
    moved: dict[int, Completion]
    unaware: dict[int, Completion]
    refused: str


def placement_world(world: World, model: str) -> PlacedRun:
    """Rank function: sample, move experts with an update, sample again."""
    from mindspeed_rl.building.models import load_weights

    job, engine = loaded_engine(world, model, FLAGS)
    layout = job.plan.rollout_layout
    found = [engine.generate(requests_of(1), SETTINGS, 0)]
    for version, told in ((1, True), (2, False)):
        slots = tuple(
            (layer, rotated(layout.experts_at(layer), version + layer))
            for layer in layout.spec.expert_layers
        )
        engine.begin_update()
        if told:
            engine.place_experts(slots)
        load_weights(job, replace(layout, layer_experts=slots), engine.weight_views())
        engine.finish_update(version)
        found.append(engine.generate(requests_of(1), SETTINGS, version))
    try:
        engine.place_experts(slots)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    linear, moved, unaware = found
    return PlacedRun(linear, moved, unaware, refused)


def rotated(slots: Slots, by: int) -> Slots:
    """Every expert in another slot, most of them on another rank."""
    return slots[by:] + slots[:by]


@dataclass(frozen=True, slots=True)
class CountedRun:
    """What one rank sampled and counted.

    Attributes:
        prompts: of its requests, by sample.
        completions: by sample; those of tensor-parallel ranks are the same.
        load: [layers, experts] tokens.
        dummy_steps: steps without requests.
    """

    prompts: dict[int, tuple[int, ...]]
    completions: dict[int, Completion]
    load: torch.Tensor
    dummy_steps: int


def counting_world(world: World, model: str, flags: Sequence[str]) -> CountedRun:
    """Rank function: sample twice, the last group of ranks far less, and count both together."""
    flags = (*flags, "--rollout-expert-placement", "balanced")
    job, engine = loaded_engine(world, model, flags)
    layout = job.plan.engine
    group = layout.group_of(world.rank)
    mine: list[GenerationRequest] = []
    if group < layout.num_groups - 1:
        mine = [replace(r, sample_id=100 * group + r.sample_id) for r in requests_of(1 + group)]
    alone = [replace(requests_of(9)[0], sample_id=999, max_tokens=3)]
    first = engine.generate(mine, SETTINGS, 0)
    dummy_steps = engine.stats.dummy_steps
    second = engine.generate(alone if not mine else [], SETTINGS, 0)
    prompts = {r.sample_id: r.token_ids for r in (*mine, *(alone if not mine else ()))}
    return CountedRun(prompts, first | second, engine.take_expert_load(), dummy_steps)
