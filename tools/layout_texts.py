"""Layouts of both sides from short texts such as ``tp=4,pp=8,ep=8``, for planning offline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.core.stages import StageLayout, even_stages, listed_stages
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.weights.layouts.megatron import MegatronLayout
from mindspeed_rl.weights.layouts.rollout import RolloutLayout

TRAIN_KEYS = ("tp", "pp", "vpp", "cp", "ep", "etp", "moe_tp_extend_ep", "num_layer_list")
ROLLOUT_KEYS = ("tp", "dp", "ep")

Layout = TypeVar("Layout", bound=RolloutLayout)


def _values(flag: str, text: str, keys: tuple[str, ...]) -> dict[str, str]:
    """Parse KEY=VALUE pairs, each key at most once."""
    values: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in keys or not value:
            raise UsageError(
                f"{flag} {part}: give KEY=VALUE pairs with commas between them; allowed keys: "
                f"{', '.join(keys)}"
            )
        if key in values:
            raise UsageError(f"{flag} {part}: {key} is given twice; remove one")
        values[key] = value
    return values


def _sizes(flag: str, values: Mapping[str, str], keys: tuple[str, ...]) -> list[int]:
    """Parse the positive numbers of ``keys``; a key that is not given is 1."""
    sizes = []
    for key in keys:
        value = values.get(key, "1")
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(f"{flag} {key}={value}: allowed are whole numbers from 1 on")
        sizes.append(int(value))
    return sizes


def _check_world(flag: str, keys: str, size: int, world: int) -> None:
    if world % size:
        raise UsageError(
            f"{flag}: {keys} = {size} does not divide --world {world}; make --world a multiple of "
            f"{size}, or lower one of them"
        )


@contextmanager
def _about(flag: str, text: str) -> Iterator[None]:
    """Prefix errors about the limits of the model with the flag that causes them."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}") from error


def training_from_text(spec: ModelSpec, text: str, world: int) -> MegatronLayout:
    """Make the training layout of a model.

    Args:
        spec: Specification of the model.
        text: ``KEY=VALUE`` pairs, keys of :data:`TRAIN_KEYS`. ``etp`` is ``tp`` when not given, as
            in Megatron; ``moe_tp_extend_ep=1`` spreads whole experts over ``ep x tp`` ranks, as in
            MindSpeed; ``num_layer_list`` has dashes between the layers of each stage or chunk.
        world: Number of all ranks.

    Raises:
        UsageError: An unknown key, a bad value, or sizes that do not fit each other or the model.
    """
    values = _values("--train", text, TRAIN_KEYS)
    tp, pp, vpp, cp, ep = _sizes("--train", values, TRAIN_KEYS[:5])
    etp = _sizes("--train", values, ("etp",))[0] if "etp" in values else tp
    extend = values.get("moe_tp_extend_ep", "0")
    if extend not in ("0", "1"):
        raise UsageError(f"--train moe_tp_extend_ep={extend}: allowed are 0 and 1")
    given = [key for key in ("ep", "etp", "moe_tp_extend_ep") if values.get(key, "1") != "1"]
    if not spec.moe and (given or extend == "1"):
        key = given[0] if given else "moe_tp_extend_ep"
        raise UsageError(f"--train {key}={values[key]}: the model has no experts; remove it")
    if extend == "1":
        if values.get("etp", "1") != "1":
            raise UsageError(
                f"--train etp={etp}: moe_tp_extend_ep=1 makes experts whole; allowed is 1: remove "
                "etp or moe_tp_extend_ep"
            )
        ep, etp = ep * tp, 1
    _check_world("--train", "tp x pp x cp", tp * pp * cp, world)
    etp = etp if spec.moe else 1
    if world // pp % (ep * etp):
        raise UsageError(
            f"--train: {ep} expert-parallel x {etp} expert-tensor-parallel ranks (etp is tp when "
            f"not given) do not divide the {world // pp} ranks of a pipeline stage; lower ep, give "
            "etp=1, or raise --world"
        )
    with _about("--train", text):
        stages = _stages(spec, values, pp, vpp)
        grid = ParallelLayout.build(world=world, stages=stages, tp=tp, cp=cp, ep=ep, etp=etp)
        return MegatronLayout(spec, grid)


def _stages(spec: ModelSpec, values: Mapping[str, str], pp: int, vpp: int) -> StageLayout:
    text = values.get("num_layer_list", "")
    if not text:
        return even_stages(spec.num_layers, pp, vpp)
    parts = text.split("-")
    if not all(part.isdecimal() for part in parts):
        raise UsageError(
            f"num_layer_list={text}: give the layers of each stage with dashes between them, e.g. "
            "7-8-8-7"
        )
    if "vpp" in values and len(parts) != pp * vpp:
        raise UsageError(
            f"num_layer_list={text} has {len(parts)} numbers; with pp={pp},vpp={vpp} it needs "
            f"{pp * vpp}"
        )
    return listed_stages(spec.num_layers, pp, [int(part) for part in parts])


def rollout_from_text(
    spec: ModelSpec, text: str, world: int, build: Callable[[ModelSpec, EngineLayout], Layout]
) -> Layout:
    """Make the rollout layout of a model with as many engines as fit into ``world``.

    Args:
        spec: Specification of the model.
        text: ``KEY=VALUE`` pairs, keys of :data:`ROLLOUT_KEYS`. ``ep`` is 1 or ``tp x dp``.
        world: Number of all ranks.
        build: Function that makes the layout of a kind of engine from the model and its ranks.

    Raises:
        UsageError: An unknown key, a bad value, or sizes that do not fit each other or the model.
    """
    values = _values("--rollout", text, ROLLOUT_KEYS)
    tp, dp, ep = _sizes("--rollout", values, ROLLOUT_KEYS)
    _check_world("--rollout", "tp x dp", tp * dp, world)
    if ep not in (1, tp * dp):
        raise UsageError(
            f"--rollout ep={ep}: experts are spread over all ranks of an engine or over none; "
            f" allowed are 1 and tp x dp = {tp * dp}"
        )
    with _about("--rollout", text):
        return build(spec, EngineLayout(world, tp, dp, ep > 1))
