"""Published models on training and rollout layouts, for the oracle and for the product."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st
from support.floor_oracle import Elements, Rect, Rollout, Training
from support.published import published_config

from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.resharding.boxes import Box
from mindspeed_rl.resharding.layouts.base import ShardLayout, pieces_of
from mindspeed_rl.resharding.layouts.from_text import rollout_from_text, training_from_text
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout
from mindspeed_rl.resharding.layouts.vllm import VllmLayout
from mindspeed_rl.resharding.planner import Transfer


@dataclass(frozen=True)
class FloorCase:
    """One model and a pair of layouts; ``changes`` are keys of its config."""

    model: str
    training: Training
    rollout: Rollout
    ranks_per_node: int = 16
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.training.world

    @property
    def config(self) -> dict[str, Any]:
        return published_config(self.model) | self.changes

    def with_layers(self, *per_chunk: int, **changes: Any) -> FloorCase:
        """The same case with other numbers of layers."""
        training = replace(self.training, layers=per_chunk)
        changes |= {"num_hidden_layers": sum(per_chunk)}
        return replace(self, training=training, changes=self.changes | changes)

    def __str__(self) -> str:
        redundant = f" {len(self.rollout.slots)} experts" if self.rollout.slots else ""
        layouts = f"{train_text(self.training)} -> {rollout_text(self.rollout)}"
        return f"{self.model} {layouts}{redundant}"


def train_text(training: Training) -> str:
    """A layout as ``--train`` of tools/inspect_plan.py spells it."""
    keys = {
        **{key: key for key in ("tp", "pp", "vpp", "cp", "ep", "etp")},
        "extend_ep": "moe_tp_extend_ep",
    }
    default = Training(training.world)
    given = {field: getattr(training, field) for field in keys}
    parts = [f"{keys[f]}={int(v)}" for f, v in given.items() if v != getattr(default, f)]
    if training.layers:
        parts.append(f"num_layer_list={'-'.join(map(str, training.layers))}")
    return ",".join(parts)


def rollout_text(rollout: Rollout) -> str:
    """A layout as ``--rollout`` of tools/inspect_plan.py spells it."""
    sizes = {key: getattr(rollout, key) for key in ("tp", "pp", "dp", "ep")}
    return ",".join(f"{key}={size}" for key, size in sizes.items() if size > 1)


def layouts_of(case: FloorCase) -> tuple[MegatronLayout, VllmLayout]:
    """The product's layouts."""
    spec = spec_from_hf_config(case.config)
    target = rollout_from_text(spec, rollout_text(case.rollout), case.world)
    return (
        training_from_text(spec, train_text(case.training), case.world),
        replace(target, physical_experts=case.rollout.slots),
    )


# --- the product's rectangles as the oracle's --------------------------------------------------


def _rect(box: Box) -> Rect:
    (row, *col), (rows, *cols) = box.lo, box.size
    lo, size = (col[0], cols[0]) if col else (0, 1)
    return Rect(row, row + rows, lo, lo + size)


def _elements(boxes: list[tuple[str, Box]]) -> Elements:
    together: dict[str, set[Rect]] = {}
    for name, box in boxes:
        together.setdefault(name, set()).add(_rect(box))
    return {name: tuple(sorted(rects)) for name, rects in together.items()}


def elements_held(layout: ShardLayout, rank: int) -> Elements:
    """What a layout says that a rank holds."""
    return _elements([(s.piece.hf_name, s.piece.hf_box) for s in pieces_of(layout, rank)])


def elements_moved(transfers: tuple[Transfer, ...]) -> Elements:
    """What some transfers carry."""
    return _elements([(t.hf_name, t.hf_box) for t in transfers])


# --- any layouts -------------------------------------------------------------------------------

MAX_WORLD, EXPERTS = 64, 16
_POWERS = (1, 2, 4, 8, 16, 32, 64)
# few experts, so that a plan of many ranks takes no time
_MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen2.5-7b", {}),
    ("qwen3-8b", {"tie_word_embeddings": True}),
    ("qwen3-30b-a3b", {"num_experts": EXPERTS}),
    ("deepseek-v3", {"n_routed_experts": EXPERTS}),
)


def _up_to(limit: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in _POWERS if n <= limit])


@st.composite
def floor_cases(draw: st.DrawFn) -> FloorCase:
    """Real matrices, few layers, any pair of layouts up to ``MAX_WORLD`` ranks."""
    model, changes = draw(st.sampled_from(_MODELS))
    moe = "experts" in "".join(changes)
    tp, pp = draw(_up_to(4)), draw(_up_to(4))
    cp = draw(_up_to(2))
    world = tp * pp * cp * draw(_up_to(MAX_WORLD // (tp * pp * cp)))
    vpp = draw(_up_to(2)) if pp > 1 else 1
    layers = draw(st.lists(st.integers(0, 2), min_size=pp * vpp, max_size=pp * vpp).filter(any))
    training = Training(world, tp, pp, vpp, cp)
    rollout_tp = draw(_up_to(min(world, 4 if model == "qwen2.5-7b" else 16)))
    rollout_pp = draw(_up_to(min(world // rollout_tp, sum(layers), 2)))
    rollout = Rollout(world, rollout_tp, pp=rollout_pp)
    if moe:
        stage = world // pp
        if extend := draw(st.booleans()):
            etp, ep = 0, draw(_up_to(min(stage, EXPERTS) // tp))
        else:
            etp = draw(_up_to(min(stage, 4)))
            ep = draw(_up_to(min(stage // etp, EXPERTS)))
        training = replace(training, ep=ep, etp=etp, extend_ep=extend)
        dp = draw(_up_to(min(world // rollout_pp, EXPERTS) // rollout_tp))
        rollout = replace(rollout, dp=dp, ep=draw(st.sampled_from([1, rollout_tp * dp])))
        if rollout.ep > 1 and EXPERTS % rollout.ep == 0 and draw(st.booleans()):
            more = [draw(st.integers(0, EXPERTS - 1)) for _ in range(rollout.ep)]
            slots = draw(st.permutations([*range(EXPERTS), *more]))
            rollout = replace(rollout, slots=tuple(slots))
    if model == "deepseek-v3":
        changes = changes | {"first_k_dense_replace": draw(st.integers(0, sum(layers)))}
    case = FloorCase(model, training, rollout, draw(_up_to(MAX_WORLD)), changes)
    return case.with_layers(*layers)
