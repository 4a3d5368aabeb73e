"""Writes adapters in the format of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

Source of the format: PEFT 0.21, ``src/peft/utils/save_and_load.py`` and
``src/peft/tuners/lora/config.py``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mindspeed_rl.adapters.modules import Adapters
from mindspeed_rl.adapters.plan import factor_name
from mindspeed_rl.algorithms.lora import LoraSettings
from mindspeed_rl.config.outputs import refuse_foreign_adapters
from mindspeed_rl.core.export_names import ADAPTER_FILES
from mindspeed_rl.core.files import sync_path
from mindspeed_rl.parallel.small_collectives import gather_objects

CONFIG, WEIGHTS = ADAPTER_FILES
_PREFIX = "base_model.model."


def peft_config(
    lora: LoraSettings, base: str, layers: Sequence[str], *, has_experts: bool = False
) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``.

    Args:
        lora: Flags of the adapters.
        base: Directory or name of the model that the adapters belong to.
        layers: Names of the linear layers of the model that have an adapter.
        has_experts: Whether the model has experts. PEFT joins the adapters of gate and up of an
            expert, with twice the rank and twice alpha, which keeps alpha / rank and no other
            scale; so the scale of rank-stabilised adapters is written as an alpha.
    """
    rslora = lora.lora_rslora and not has_experts
    alpha = lora.lora_alpha if rslora else lora.scale * lora.lora_rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.lora_rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "use_rslora": rslora,
        "target_modules": list(layers),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def gather_adapters(adapters: Adapters) -> dict[str, torch.Tensor]:
    """Return A and B of all adapters of the model on the host, by PEFT's names.

    Collective: the world. Of the ranks with the same adapter the first one sends it.
    """
    parts = gather_objects(adapters.host_tensors())
    found = {name: tensor for part in parts for name, tensor in part.items()}
    return {
        _PREFIX + factor_name(hf_name, factor): found[factor_name(hf_name, factor)]
        for hf_name in adapters.layout.hf_shapes
        if adapters.lora.covers(hf_name)
        for factor in "AB"
    }


def write_adapters(adapters: Adapters, folder: Path, base: str, *, writes: bool) -> None:
    """Write the adapters of a run, in place of those that it wrote before. Collective: the world.

    Args:
        adapters: Adapters of this rank, on the device.
        folder: Folder to write.
        base: Directory or name of the model that they belong to.
        writes: Whether this rank writes.

    Raises:
        OSError: It cannot be written.
        UsageError: The folder holds other files.
    """
    tensors = gather_adapters(adapters)
    if writes:
        has_experts = adapters.layout.spec.moe is not None
        layers = adapters.lora.layers_among(adapters.layout.hf_shapes)
        config = peft_config(adapters.lora, base, layers, has_experts=has_experts)
        write_peft(folder, config, tensors)


def write_peft(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write a folder in PEFT's format under another name, then rename it. Local.

    Raises:
        OSError: It cannot be written.
        UsageError: The folder holds other files.
    """
    refuse_foreign_adapters(folder)
    work = folder.with_name(f".{folder.name}.tmp{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        save_file(dict(tensors), str(work / WEIGHTS), metadata={"format": "pt"})
        (work / CONFIG).write_text(json.dumps(dict(config), indent=2), encoding="utf-8")
        shutil.copymode(work / CONFIG, work / WEIGHTS)  # safetensors' files are private
        for file in work.iterdir():
            sync_path(file)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(work, folder)
        sync_path(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
