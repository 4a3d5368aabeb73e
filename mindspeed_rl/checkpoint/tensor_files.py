"""The files of tensors that a rank writes into a folder of a checkpoint. Local."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from mindspeed_rl.checkpoint.archives import WrittenFile, write_archives
from mindspeed_rl.checkpoint.saving import Written

#: An item of a plan and its content: values of a tensor, or a finished archive.
Entry = tuple[WriteItem, torch.Tensor | io.BytesIO]


class RankFiles:
    """Files of a folder of tensors, all of one rank.

    Args:
        folder: Folder that is written into.
        planned: Contents by the name of the file.
        shards: More tensors, which only this rank has; each goes to the smallest file.
        live: What the models may change; other tensors are copies already.
        place: Makes an entry's place of the name of a file, an offset and a length.
    """

    def __init__(
        self,
        folder: Path,
        planned: Mapping[str, Sequence[Entry]],
        shards: Sequence[tuple[WriteItem, torch.Tensor]],
        live: Iterable[object],
        place: Callable[[str, int, int], Any],
    ) -> None:
        self.folder, self._place = folder, place
        files: dict[str, list[Entry]] = {name: list(planned[name]) for name in planned}
        sizes = {name: sum(map(_num_bytes, files[name])) for name in files}
        for entry in shards:
            smallest = min(sizes, key=sizes.__getitem__)
            files[smallest].append(entry)
            sizes[smallest] += _num_bytes(entry)
        self._files = {name: entries for name, entries in files.items() if entries}
        self._shards = [item for item, _ in shards]
        tensors = [*live, *(content for _, content in shards)]
        self._live = {_memory(t) for t in tensors if isinstance(t, torch.Tensor)}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that this rank writes, each with its name and offset in the model."""
        for entries in self._files.values():
            for item, content in entries:
                if isinstance(content, torch.Tensor):
                    assert item.tensor_data is not None, item
                    offset = tuple(item.tensor_data.chunk.offsets)
                    yield tensor_name(item.index.fqn, offset), content

    def stage(self, copies: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]) -> None:
        """Put copies in the place of what is to be written, unless it is a copy already. Local."""
        places = [
            (entries, number, content)
            for entries in self._files.values()
            for number, (_, content) in enumerate(entries)
            if isinstance(content, torch.Tensor) and _memory(content) in self._live
        ]
        found = copies([content for *_, content in places])
        for (entries, number, _), copy in zip(places, found, strict=True):
            entries[number] = (entries[number][0], copy)

    def write(self) -> Written:
        """Write this rank's files, all at the same time, and flush them to disk. Local.

        Raises:
            OSError: One of them cannot be written.
        """

        def write_one(name: str) -> WrittenFile:
            return write_archives(self.folder / name, [c for _, c in self._files[name]])

        with ThreadPoolExecutor(max(1, len(self._files))) as pool:
            written = dict(zip(self._files, pool.map(write_one, self._files), strict=True))
        results: list[Any] = [
            WriteResult(item.index, length, self._place(name, start, length))
            for name, entries in self._files.items()
            for (item, _), (start, length) in zip(entries, written[name].places, strict=True)
        ]
        return Written([(results, self._shards)], {name: f.mark for name, f in written.items()})


def split_results(results: Sequence[Sequence[Any]]) -> tuple[list[list[Any]], list[WriteItem]]:
    """Return where entries lie, of each rank, and the shards of all, from the results of ranks."""
    of_ranks = [found for of_rank in results for found in of_rank]
    return [places for places, _ in of_ranks], [item for _, items in of_ranks for item in items]


def tensor_name(key: str, offset: tuple[int, ...]) -> str:
    """Name a part of a tensor by its key in checkpoints and its offset in the whole model."""
    return f"{key} at {list(offset)}" if any(offset) else key


def _num_bytes(entry: Entry) -> int:
    return entry[1].nbytes if isinstance(entry[1], torch.Tensor) else 0


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
