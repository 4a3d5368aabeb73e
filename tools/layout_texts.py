"""Layouts of both sides from short texts such as ``tp=4,pp=8,ep=8``, for planning offline.

A key is short for a flag of a run, so that the run's own checks decide what is possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import ScoreRunConfig
from mindspeed_rl.config.layouts import engine_layout, training_layout
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

TRAIN_KEYS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "moe_tp_extend_ep": "--moe-tp-extend-ep",
    "num_layer_list": "--num-layer-list",
}
ROLLOUT_KEYS = {"tp": "--rollout-tp", "dp": "--rollout-dp", "ep": "--rollout-ep"}


def _flags(flag: str, text: str, keys: Mapping[str, str]) -> Iterator[str]:
    """Yield the flags of a run that a text of KEY=VALUE pairs stands for."""
    given: set[str] = set()
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in keys or not value or key in given:
            raise UsageError(
                f"{flag} {part}: give KEY=VALUE pairs with commas between them, each key once; "
                f"allowed keys: {', '.join(keys)}"
            )
        given.add(key)
        if key == "num_layer_list":
            yield f"{keys[key]}={value.replace('-', ',')}"
        elif key != "moe_tp_extend_ep":
            yield f"{keys[key]}={value}"
        elif value not in ("0", "1"):
            raise UsageError(f"{flag} {part}: allowed are 0 and 1")
        elif value == "1":
            yield keys[key]


def config_from_texts(train: str, rollout: str) -> ScoreRunConfig:
    """Return the configuration of a run with the layouts of two texts.

    Args:
        train: ``KEY=VALUE`` pairs, keys of :data:`TRAIN_KEYS`; ``num_layer_list`` has dashes
            between the layers of each stage or chunk.
        rollout: ``KEY=VALUE`` pairs, keys of :data:`ROLLOUT_KEYS`.

    Raises:
        UsageError: An unknown key or a bad value.
    """
    # Sequence parallelism, which experts need, does not move weights.
    flags = ["--sequence-parallel", *_flags("--train", train, TRAIN_KEYS)]
    flags += _flags("--rollout", rollout, ROLLOUT_KEYS)
    return parse(ScoreRunConfig, flags, "layouts").config


def layouts_from_texts(
    spec: ModelSpec, train: str, rollout: str, world: int
) -> tuple[MegatronLayout, VllmLayout]:
    """Make the layouts of trainer and engine; ``world`` decides data parallelism and engines.

    Raises:
        UsageError: A text is malformed, or the sizes do not fit each other, the world or the model.
    """
    config = config_from_texts(train, rollout)
    parallel = training_layout(config.model, config.parallel, spec, world)
    engine = engine_layout(config.rollout, world)
    return MegatronLayout(spec, parallel), VllmLayout(spec, engine)
