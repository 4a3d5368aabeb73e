"""Data sets that the ``datasets`` library reads: parquet, csv, arrow, folders, and the hub's."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rl.core.data_source import DataSource
from mindspeed_rl.core.digest import file_digest
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.hub import how_to_get, snapshot

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
# What the library writes beside the files of `Dataset.save_to_disk`.
_SAVED = ("dataset_dict.json", "state.json")


def local_place(source: DataSource, flag: str) -> Path:
    """Return the local file or folder of a data set; one of the hub is downloaded once per node.

    Unless the user sets ``HF_HUB_OFFLINE=0``, the hub's cache of this machine is all that is looked
    at.

    Raises:
        UsageError: the hub or its cache has no such data set or revision, or cannot be reached.
    """
    if not source.on_hub:
        return Path(source.place)
    try:
        return snapshot(source.place, source.revision, "dataset")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{flag} {source.text}: no local file or folder, and as a data set of the hub it "
            f"cannot be had: {_first_line(error)} Give a local one, or "
            f"{how_to_get(source.place, source.revision, 'dataset')}"
        ) from error


def content_digest(source: DataSource, flag: str) -> str:
    """Return a digest of all bytes of a data set's files, and of what of them is read. Local.

    Raises:
        UsageError: a file cannot be read, or the hub does not have it.
    """
    try:
        return _content_digest(source, local_place(source, flag))
    except OSError as error:
        raise UsageError(f"{flag} {source.text}: cannot be read: {error}") from error


def _content_digest(source: DataSource, place: Path) -> str:
    whole = hashlib.sha256(f"{source.subset}:{source.split}".encode())
    for path in [place] if place.is_file() else sorted(place.rglob("*")):
        if not path.is_file():
            continue
        digest = file_digest(path)
        # A file's suffix says how to read it; the name of a single one does not matter else.
        name = path.suffix if path == place else path.relative_to(place).as_posix()
        whole.update(f"\n{name}:{digest}".encode())
    return whole.hexdigest()


def library_rows(source: DataSource, flag: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a data set as plain Python values; nothing is copied to disk.

    All values of ``.csv`` files are text, in a folder where it has no other data and they have the
    same columns; elsewhere the library decides their types.

    Raises:
        UsageError: the data set lacks the split or subset, or the library cannot read it.
    """
    import datasets

    datasets.disable_progress_bars()
    # It logs what it raises as well.
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    place = local_place(source, flag)
    try:
        yield from _open(source, flag, place)
    except UsageError:
        raise
    except (
        *(ValueError, OSError, TypeError, KeyError, NotImplementedError),  # pyarrow's and pandas'
        datasets.exceptions.DatasetsError,
    ) as error:
        raise UsageError(
            f"{flag} {source.text}: the datasets library cannot read it: {_first_line(error)} "
            "Repair it, or give another one"
        ) from error


def _open(source: DataSource, flag: str, place: Path) -> Dataset | IterableDataset:
    import datasets

    how = _csv_as_text(source, flag, place)
    if place.is_file():
        found: IterableDataset = datasets.load_dataset(
            _BUILDERS[place.suffix], data_files=str(place), split="train", streaming=True, **how
        )
        return found
    if any((place / name).is_file() for name in _SAVED):
        parts = datasets.load_from_disk(str(place))
    else:
        parts = datasets.load_dataset(str(place), source.subset or None, streaming=True, **how)
    if not isinstance(parts, dict):
        if source.split:
            raise UsageError(
                f"{flag} {source.text}: the folder holds one data set without splits; give "
                f"{source.place}"
            )
        return parts
    split = source.split or ("train" if "train" in parts else "")
    if not split and len(parts) == 1:
        (split,) = parts
    if split not in parts:
        raise UsageError(
            f"{flag} {source.text}: the split {split!r} is not among {', '.join(sorted(parts))}; "
            f"name one of them: {source.place}{'@' if source.revision else ''}{source.revision}:"
            f"{source.subset}{'/' if source.subset else ''}{sorted(parts)[0]}"
        )
    return parts[split]


def _csv_as_text(source: DataSource, flag: str, place: Path) -> dict[str, Any]:
    """Return how csv files are read with text as the values of all columns.

    Else "007" would become the number 7, and "NA" a missing value. Nothing for other files, and
    for a folder whose files differ in kind or columns.
    """
    import datasets

    files = [place] if place.is_file() else sorted(place.rglob("*"))
    data = [file for file in files if file.suffix in (".json", ".jsonl", *_BUILDERS)]
    if any(file.suffix != ".csv" for file in data):
        return {}
    headers = [_csv_columns(source, flag, file) for file in data]
    if not headers or any(header != headers[0] for header in headers):
        return {}
    text = datasets.Features({name: datasets.Value("string") for name in headers[0]})
    return {"features": text, "keep_default_na": False, "index_col": False}


def _csv_columns(source: DataSource, flag: str, place: Path) -> list[str]:
    """Return the columns of a file's header.

    Raises:
        UsageError: Names repeat, or the first row has more fields.
    """
    with place.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        columns, first = next(rows, []), next(rows, [])
    if len(set(columns)) < len(columns) or len(first) > len(columns):
        raise UsageError(
            f"{flag} {source.text}: the header has the columns {', '.join(columns)}, the first row "
            f"{len(first)} fields; give each field a column with a name of its own, and quote "
            "fields with commas"
        )
    return columns


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{text or type(error).__name__}{'' if text.endswith('.') else '.'}"
