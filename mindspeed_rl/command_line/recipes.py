"""The launch recipes and tools that come with the package, as files of one's own.

usage: mindspeed-rl recipes            lists them
       mindspeed-rl recipes DIR        writes DIR/pretrain_scripts and DIR/tools

The scripts find each other beside them, and the package in the environment that is active. What
they read and write by default, models, data and outputs, lies in DIR.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mindspeed_rl.core.shipped import FOLDERS, shipped_files, source_folder

_USAGE_ERROR = 2


def write_files(source: Path, target: Path) -> int:
    """Write recipes and tools into a folder and return their number.

    Raises:
        FileExistsError: The folder has some already; nothing is written.
    """
    for folder in FOLDERS:
        if (target / folder).exists():
            raise FileExistsError(
                f"{target / folder} exists; give a folder without it, or move it away"
            )
    files = shipped_files(source)
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, target / file)
        (target / file).chmod(0o755 if file.suffix == ".sh" else 0o644)
    return len(files)


def described(source: Path) -> str:
    """Return a line for each script that is started by itself: what its head says of it."""
    lines = []
    for folder in FOLDERS:
        for path in sorted((source / folder).glob("*.*")):
            if path.relative_to(source) in shipped_files(source) and (about := _about(path)):
                lines.append(f"{folder + '/' + path.name:57} {about}")
    return "\n".join(lines)


def _about(path: Path) -> str:
    """Return the beginning of a script's head; empty: it is no script of its own."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sh" and text.startswith("#!"):
        lines = text.splitlines()[1:]
        head = " ".join(line.removeprefix("#").strip() for line in lines[: lines.index("#")])
    elif path.suffix == ".py" and "__main__" in text:
        head = " ".join(text.removeprefix('"""').partition('"""')[0].partition("\n\n")[0].split())
    else:
        return ""
    return head.partition(". ")[0].partition(": ")[0].rstrip(".")


def main(argv: Sequence[str] | None = None) -> int:
    """List or write recipes and tools; return the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    if len(arguments) > 1 or any(word.startswith("-") for word in arguments):
        print(
            f"mindspeed-rl recipes: {' '.join(arguments)}: give one folder to write into, or "
            "nothing for a list",
            file=sys.stderr,
        )
        return _USAGE_ERROR
    try:
        source = source_folder()
        if not arguments:
            print(described(source))
            return 0
        target = Path(arguments[0])
        count = write_files(source, target)
    except OSError as error:
        print(f"mindspeed-rl recipes: {error}", file=sys.stderr)
        return _USAGE_ERROR
    print(f"{count} files in {target}; in the environment of the package, for example:")
    print(f"  bash {target}/pretrain_scripts/grpo_qwen2_5_7b_1node.sh --rl-dry-run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
