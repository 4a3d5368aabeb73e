"""Published models on training and rollout layouts, for the oracle and for the product."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

from hypothesis import strategies as st
from support.floor_oracle import Elements, Rect, Rollout, Training
from support.published import published_config

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.rollout.vllm.layout import VllmLayout
from mindspeed_rl.weights.layouts.base import ShardLayout, pieces_of
from mindspeed_rl.weights.layouts.from_text import rollout_from_text, training_from_text
from mindspeed_rl.weights.layouts.megatron import MegatronLayout
from mindspeed_rl.weights.planner import Transfer


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
    target = rollout_from_text(spec, rollout_text(case.rollout), case.world, VllmLayout)
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

MAX_WORLD = 64
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class _Model:
    """A published model with few experts, so that a plan of many ranks takes no time.

    Attributes:
        name: of its config.
        training_tp: tensor-parallel sizes of the trainer that its shapes allow.
        rollout_tp: those of the engine.
        experts: of a layer.
        changes: of its config.
    """

    name: str
    training_tp: tuple[int, ...]
    rollout_tp: tuple[int, ...]
    experts: int = 0
    changes: dict[str, Any] = field(default_factory=dict)


_TWOS, _THREES = (1, 2, 4), (1, 2, 3, 4, 6)
# vLLM shares a vocabulary in blocks of 64: 2304 blocks are three times 768
_DIVISIBLE_BY_3 = {"vocab_size": 2304 * 64, "num_attention_heads": 48}
_MODELS = (
    _Model("qwen2.5-7b", _TWOS, _TWOS),
    _Model("qwen3-8b", _TWOS, (1, 2, 4, 8, 16), changes={"tie_word_embeddings": True}),
    _Model("qwen3-30b-a3b", _TWOS, (1, 2, 4, 8, 16), 16, {"num_experts": 16}),
    _Model("deepseek-v3", _TWOS, (1, 2, 4, 8, 16), 16, {"n_routed_experts": 16}),
    # sizes that do not divide each other
    _Model(
        "qwen3-8b",
        _THREES,
        (1, 2, 3, 4, 6, 12, 24),
        0,
        _DIVISIBLE_BY_3 | {"num_key_value_heads": 12},
    ),
    _Model(
        "qwen3-30b-a3b",
        _THREES,
        (1, 2, 3, 4, 6, 12),
        12,
        _DIVISIBLE_BY_3 | {"num_key_value_heads": 12, "num_experts": 12},
    ),
    _Model(
        "deepseek-v3",
        _THREES,
        (1, 2, 3, 4, 6, 12),
        24,
        _DIVISIBLE_BY_3
        | {"num_key_value_heads": 48, "n_routed_experts": 24, "moe_intermediate_size": 1536},
    ),
)


def _size(number: int, *, limit: int = MAX_WORLD) -> st.SearchStrategy[int]:
    """What divides a number of ranks, or of experts."""
    return st.sampled_from([n for n in _SIZES if n <= limit and not number % n])


def _up_to(limit: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in _SIZES if n <= limit])


@st.composite
def _with_experts(
    draw: st.DrawFn, model: _Model, training: Training, rollout: Rollout
) -> tuple[Training, Rollout]:
    """The same layouts with experts shared out on both sides."""
    stage, experts = training.world // training.pp, model.experts
    if extend := draw(st.booleans()):
        etp, ep = 0, draw(_size(gcd(stage, experts) // training.tp))
    else:
        etp = draw(st.sampled_from([n for n in model.training_tp if not stage % n]))
        ep = draw(_size(gcd(stage // etp, experts)))
    training = replace(training, ep=ep, etp=etp, extend_ep=extend)
    dp = draw(_size(gcd(rollout.world // (rollout.pp * rollout.tp), experts // rollout.tp)))
    ep = draw(st.sampled_from([1, rollout.tp * dp]))
    rollout = replace(rollout, dp=dp, ep=ep)
    if ep > 1 and draw(st.booleans()):
        more = [draw(st.integers(0, experts - 1)) for _ in range(ep)]
        slots = draw(st.permutations([*range(experts), *more]))
        rollout = replace(rollout, slots=tuple(slots))
    return training, rollout


@st.composite
def floor_cases(draw: st.DrawFn) -> FloorCase:
    """Real matrices, few layers, any pair of layouts up to ``MAX_WORLD`` ranks."""
    model = draw(st.sampled_from(_MODELS))
    tp, pp, cp = draw(st.sampled_from(model.training_tp)), draw(_up_to(4)), draw(_up_to(2))
    world = tp * pp * cp * draw(_up_to(MAX_WORLD // (tp * pp * cp)))
    vpp = draw(_up_to(2)) if pp > 1 else 1
    layers = draw(st.lists(st.integers(0, 2), min_size=pp * vpp, max_size=pp * vpp).filter(any))
    training = Training(world, tp, pp, vpp, cp)
    rollout_tp = draw(st.sampled_from([n for n in model.rollout_tp if not world % n]))
    rollout_pp = draw(_size(world // rollout_tp, limit=min(sum(layers), 2)))
    rollout = Rollout(world, rollout_tp, pp=rollout_pp)
    if model.experts:
        training, rollout = draw(_with_experts(model, training, rollout))
    changes = dict(model.changes)
    if model.name == "deepseek-v3":
        changes["first_k_dense_replace"] = draw(st.integers(0, sum(layers)))
    case = FloorCase(model.name, training, rollout, draw(_up_to(MAX_WORLD)), changes)
    return case.with_layers(*layers)
