"""Refuses to resume from a checkpoint that the models of a run cannot take. Local."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_rl.checkpoint.resume import CheckpointRecord, CompanionRecord
from mindspeed_rl.core.errors import UsageError

#: Name of what a checkpoint says of the adapters that it holds instead of weights.
ADAPTERS = "adapters"
#: In it, a checksum of the weights that the adapters belong to.
BASE = "base"


def check_model(
    mine: Mapping[str, Any],
    role: str,
    record: CheckpointRecord | CompanionRecord,
    path: Path,
) -> None:
    """Refuse a checkpoint of another architecture.

    Args:
        mine: Fields of the run's spec, as JSON has them.
        role: Role of the model.
        record: What the checkpoint says of the model.
        path: Folder of the checkpoint.

    Raises:
        UsageError: The two differ.
    """
    _check_adapters(mine.get(ADAPTERS), record.model.get(ADAPTERS), path)
    wrong = [
        f"{name} {record.model.get(name)} (model: {value})"
        for name, value in mine.items()
        # Layers of multi-token prediction are never built.
        if record.model.get(name) != value and name not in ("num_mtp_layers", ADAPTERS)
    ]
    flag = "--critic-hf-checkpoint" if role == "critic" else "--hf-checkpoint"
    if wrong:
        raise UsageError(
            f"{path} is of another model than {flag}: {', '.join(wrong)}; name the {flag} that "
            "the run started from"
        )


def _check_adapters(
    mine: Mapping[str, Any] | None, kept: Mapping[str, Any] | None, path: Path
) -> None:
    """Refuse whole weights where adapters are trained, the reverse, and other adapters."""
    if mine == kept:
        return
    if kept is None:
        raise UsageError(
            f"{path} holds whole weights, and --lora-rank trains adapters; remove --lora-rank, or "
            "name the exported model of that run as --hf-checkpoint, without --load"
        )
    if mine is None:
        raise UsageError(
            f"{path} holds adapters of rank {kept['lora_rank']}, and this run trains all weights; "
            "add --lora-rank and the other flags of the adapters, or name the exported model of "
            "that run as --hf-checkpoint, without --load"
        )
    wrong = [
        f"--{name.replace('_', '-')} {kept[name]} (this run: {value})"
        for name, value in mine.items()
        if name != BASE and kept[name] != value
    ]
    if wrong:
        raise UsageError(f"{path} holds other adapters: {', '.join(wrong)}; give the same flags")
    raise UsageError(
        f"{path} holds adapters of other weights than --hf-checkpoint has in this precision: name "
        "the --hf-checkpoint that the run started from, and --bf16 as there"
    )


def check_optimizer(mine: str, record: CheckpointRecord | CompanionRecord, path: Path) -> None:
    """Refuse optimizer states that are missing, or of another kind than ``mine``.

    Raises:
        UsageError: They are.
    """
    if not record.optimizer:
        raise UsageError(f"{path} has no optimizer states (--no-save-optim); add --no-load-optim")
    if record.optimizer != mine:
        raise UsageError(
            f"{path} has the states of another optimizer ({record.optimizer}; this run: {mine}); "
            "set --use-distributed-optimizer and --bf16 as in the saved run, or add --no-load-optim"
        )
