"""Choice of the modules of the trainer's layers, by flags and by what is installed."""

from __future__ import annotations

from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.core.installed import has_transformer_engine, resolve_platform
from mindspeed_rl.models.module_names import GROUPED, LOCAL, TRANSFORMER_ENGINE, ModuleNames


def module_names(model: ModelConfig, platform: str) -> ModuleNames:
    """The modules of ``--transformer-impl`` and ``--moe-grouped-gemm`` on ``--platform``.

    A script may ask for Transformer Engine where there is none; it then gets local modules.
    """
    asked = model.transformer_impl
    if asked == "auto" and resolve_platform(platform) == "npu":
        asked = "transformer_engine"
    if asked != "transformer_engine" or not has_transformer_engine(platform):
        return LOCAL
    return GROUPED if model.moe_grouped_gemm else TRANSFORMER_ENGINE


def modules_note(model: ModelConfig, platform: str) -> list[str]:
    """The line of the log for a ``--transformer-impl`` whose modules are not installed."""
    if model.transformer_impl != "transformer_engine" or has_transformer_engine(platform):
        return []
    return [
        "--transformer-impl transformer_engine: Transformer Engine is not installed here, the "
        "model is built of megatron-core's local modules"
    ]
