"""Names of data sets, as flags give them: a local file or folder, or a data set of the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import why_unreadable

FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow")
ALLOWED = (
    f"a file ({', '.join(FILE_SUFFIXES)}), a folder (FOLDER or FOLDER:SPLIT), or a data set of the "
    "hub (ORG/NAME@REVISION:SPLIT, of which @REVISION and :SPLIT may be left out)"
)
_NAME = re.compile(
    r"(?P<place>[^@:]+)(?:@(?P<revision>[^@:]+))?(?::(?:(?P<subset>[^:/]+)/)?(?P<split>[^:/]+))?"
)
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class DataSource:
    """A data set by its name.

    Attributes:
        text: The name as given.
        place: Path of the local file or folder, or the name on the hub.
        on_hub: Whether it is a data set of the hub.
        revision: Branch, tag or commit on the hub; empty: its default branch.
        subset: Name of the configuration, for data sets that have several; empty: the only one.
        split: Name of the split; empty: ``train``, or the only one.
    """

    text: str
    place: str
    on_hub: bool = False
    revision: str = ""
    subset: str = ""
    split: str = ""

    @classmethod
    def parse(cls, text: str, flag: str) -> DataSource:
        """Read a name; what exists on this machine is local. Looks at no file's content.

        ``FOLDER:SPLIT`` and ``ORG/NAME@REVISION:SPLIT``; a split is ``SUBSET/SPLIT`` where the
        data set has several configurations.

        Args:
            text: The name.
            flag: Flag that gave it, for messages.

        Raises:
            UsageError: there is no such file or folder and it is no name of the hub, or a file's
                suffix is not known.
        """
        path = Path(text)
        try:
            is_folder = path.is_dir()
        except OSError as error:  # a folder above it is closed to this user
            raise UsageError(f"{flag} {text}: {why_unreadable(path, error)}") from error
        if is_folder:
            return cls(text, text)
        if path.is_file():
            if path.suffix not in FILE_SUFFIXES:
                raise UsageError(
                    f"{flag} {text}: a data file must end in one of {', '.join(FILE_SUFFIXES)}"
                )
            return cls(text, text)
        match = _NAME.fullmatch(text)
        if match is not None:
            place, revision, subset, split = (part or "" for part in match.groups())
            if Path(place).is_dir() and not revision:
                return cls(text, place, subset=subset, split=split)
            if _ON_HUB.fullmatch(place) and Path(place).suffix not in FILE_SUFFIXES:
                return cls(text, place, True, revision, subset, split)
        raise UsageError(f"{flag} {text}: no such file or folder; give {ALLOWED}")
