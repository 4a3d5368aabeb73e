"""What a wheel brings beside the package: launch recipes, tools, and the commit it was made of.

setup.py loads this file alone, so it imports nothing of the package.
"""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("pretrain_scripts", "tools")
SHIPPED = "shipped"  # folder of an installed package that has those folders
COMMIT = "commit"  # file in it
OF_AUTHORS = frozenset({"make_flag_docs.py", "snapshot_scripts.py", "soak.py"})
_SUFFIXES = frozenset({".sh", ".py", ".json"})
_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_files(root: Path) -> list[Path]:
    """Return the files of recipes and tools below a folder, relative to it."""
    return sorted(
        path.relative_to(root)
        for folder in FOLDERS
        for path in (root / folder).rglob("*")
        if path.suffix in _SUFFIXES and path.name not in OF_AUTHORS
    )


def source_folder() -> Path:
    """Return where recipes and tools lie: in the installed package, or in its repository.

    Raises:
        FileNotFoundError: They are in neither.
    """
    for root in (_PACKAGE / SHIPPED, _PACKAGE.parent):
        if all((root / folder).is_dir() for folder in FOLDERS):
            return root
    raise FileNotFoundError(
        f"the package in {_PACKAGE} came without recipes; install a wheel that `pip wheel` made of "
        "the repository"
    )


def noted_commit(package: Path = _PACKAGE) -> str | None:
    """Return the commit of an installed package, empty if unknown; ``None``: it is a checkout."""
    note = package / SHIPPED / COMMIT
    return note.read_text(encoding="utf-8").strip() if note.is_file() else None
