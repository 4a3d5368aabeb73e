"""Keeps the responses that drafts are made from beside the checkpoints of a run.

There is one file for all checkpoints of a folder, with the responses at the last save: a run that
goes on without them samples the same responses, in more steps.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mindspeed_rl.core.files import atomic_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "drafts.bin"
_HEADER_BYTES = 4096  # more than a header has


def save_drafts(run: Any, folder: str) -> None:
    """Write the responses to a folder of checkpoints, from rank 0. Local.

    Raises:
        OSError: They could not be written; the message names the folder and what to do.
    """
    history = run.rollouts.drafts
    if history is None or run.job.world.rank != 0:
        return
    content = history.to_bytes(vocabulary_digest(run.data.tokenizer))
    try:
        with atomic_path(Path(folder) / FILE) as path:
            path.write_bytes(content)
    except OSError as error:
        free = shutil.disk_usage(folder).free / 2**20
        raise OSError(
            error.errno,
            f"--save {folder}: {FILE}, {len(content) / 2**20:.1f} MiB of responses for drafts, "
            f"could not be written: {error.strerror or error} ({free:.1f} MiB are free): make "
            "room and start again with --load; the checkpoints are untouched",
        ) from error


def restore_drafts(run: Any, folder: str) -> None:
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
            content[0] = file.read(_HEADER_BYTES + 2 * history.limit_bytes)
    dist.broadcast_object_list(content, 0)
    if not content[0]:
        return
    digest, vocab_size = vocabulary_digest(run.data.tokenizer), run.job.plan.spec.vocab_size
    if reason := history.load(content[0], digest, vocab_size):
        run.job.log_rank0(f"--load: {path} is dropped, drafts begin anew: {reason}")


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of which token each number stands for."""
    text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
