"""An engine of gloo ranks that samples the same requests with its experts in several places."""

from __future__ import annotations

from dataclasses import dataclass, replace

from support.draft_world import SETTINGS, requests_of
from support.rollout_worlds import loaded_engine

from mindspeed_rl.core.types import Completion
from mindspeed_rl.launch.bootstrap import World
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
    from mindspeed_rl.rl.build_models import load_weights

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
