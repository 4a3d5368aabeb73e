"""Finds models and data sets of the Hugging Face hub on this machine, or downloads them once."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from mindspeed_rl.core.locks import file_lock

_OFF = ("0", "off", "no", "false")


def is_online() -> bool:
    """Whether the user lets this process ask the hub: ``HF_HUB_OFFLINE`` is given as off."""
    return os.environ.get("HF_HUB_OFFLINE", "1").lower() in _OFF


def snapshot(name: str, revision: str, kind: str, patterns: Sequence[str] | None = None) -> Path:
    """Return the folder of a repository in the cache that the processes of a node share.

    Unless :func:`is_online`, only the cache is looked at. Else one process of the node asks the hub
    at a time; those that waited for it find the files in the cache.

    Args:
        name: ``ORG/NAME``.
        revision: Branch, tag or commit; empty is the default branch.
        kind: ``"model"`` or ``"dataset"``.
        patterns: File names that are downloaded; ``None`` is all.

    Raises:
        OSError: Neither the cache nor the hub has it, or the hub cannot be reached.
        ValueError: The name or the revision cannot be one.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the library reads it when it is imported
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def folder(offline: bool) -> Path:
        return Path(
            snapshot_download(
                name,
                repo_type=kind,
                revision=revision or None,
                allow_patterns=None if patterns is None else list(patterns),
                local_files_only=offline,
            )
        )

    if not is_online():
        try:
            return folder(True)
        except LocalEntryNotFoundError as error:
            raise FileNotFoundError("it is not in the hub's cache of this machine") from error
    waited: list[str] = []
    lock = Path(constants.HF_HUB_CACHE, f".{name.replace('/', '--')}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(lock, math.inf, waited.append):
        return folder(bool(waited))


def how_to_get(name: str, revision: str, kind: str) -> str:
    """Return how a user gets a repository that is not on this machine, for the end of an error."""
    options = f" --revision {revision}" if revision else ""
    options += "" if kind == "model" else f" --repo-type {kind}"
    return (
        f"download it on every node with `hf download {name}{options}`, or start with "
        f"HF_HUB_OFFLINE=0 where there is a network (now "
        f"{os.environ.get('HF_HUB_OFFLINE', 'not set')})"
    )
