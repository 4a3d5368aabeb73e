"""Keeps the responses that drafts are made from beside the checkpoints of a run.

There is one file for all checkpoints of a folder, with the responses at the last save: a run that
goes on without them samples the same responses, in more steps.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from mindspeed_rl.core.files import atomic_path
from mindspeed_rl.rl.components import Components

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "drafts.bin"


def save_drafts(run: Components, folder: str) -> None:
    """Write the responses to a folder of checkpoints, from rank 0. Local."""
    history = run.rollouts.drafts
    if history is None or run.job.world.rank != 0:
        return
    with atomic_path(Path(folder) / FILE) as path:
        path.write_bytes(history.to_bytes(vocabulary_digest(run.data.tokenizer)))


def restore_drafts(run: Components, folder: str) -> None:
    """Take the responses of a folder of checkpoints, or say why they are dropped.

    Rank 0 reads them for all. Collective: the world, where the run drafts.
    """
    history = run.rollouts.drafts
    if history is None:
        return
    content, path = [b""], Path(folder) / FILE
    if run.job.world.rank == 0 and path.is_file():
        # More is dropped anyway; the rest of a file that is no history stays on the disk.
        with path.open("rb") as file:
            content[0] = file.read(2 * history.limit_bytes)
    dist.broadcast_object_list(content, 0)
    if not content[0]:
        return
    if reason := history.load(content[0], vocabulary_digest(run.data.tokenizer)):
        run.job.log_rank0(f"--load: {path} is dropped, drafts begin anew: {reason}")


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of which token each number stands for."""
    text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
