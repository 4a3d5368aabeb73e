"""Published models: their configs, and pairs of layouts for them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from layout_texts import layouts_from_texts
from support.architecture import ROOT

from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

PUBLISHED = {p.stem: p for p in sorted((ROOT / "pretrain_scripts/models/configs").glob("*.json"))}


def published_config(model: str) -> dict[str, Any]:
    """The config of a model as if its weights were bfloat16."""
    config: dict[str, Any] = json.loads(PUBLISHED[model].read_text())
    config.pop("quantization_config", None)
    return config


@dataclass(frozen=True)
class Reshard:
    """A published model between two layouts, which are spelled as in tools/inspect_plan.py.

    Attributes:
        model: name of the config.
        world: all ranks.
        train: the training layout; its ``num_layer_list`` also shortens the model.
        rollout: the engine's layout.
        ranks_per_node: of the machine.
        changes: keys of the config that differ.
        experts: the expert in each slot of an engine with redundant experts.
    """

    model: str
    world: int
    train: str
    rollout: str
    ranks_per_node: int = 16
    changes: Mapping[str, Any] = field(default_factory=dict)
    experts: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.model} {self.train} -> {self.rollout}"

    def layouts(self) -> tuple[MegatronLayout, VllmLayout]:
        """Of the trainer and of the engine."""
        config = published_config(self.model) | self.changes
        if layers := re.search(r"num_layer_list=([\d-]+)", self.train):
            config["num_hidden_layers"] = sum(map(int, layers[1].split("-")))
        spec = spec_from_hf_config(config)
        source, target = layouts_from_texts(spec, self.train, self.rollout, self.world)
        return source, replace(target, physical_experts=self.experts)
