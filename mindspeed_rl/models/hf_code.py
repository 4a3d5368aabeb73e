"""Python code in a Hugging Face checkpoint: modules that ``auto_map`` names, and their imports."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_rl.core.errors import UsageError

_CONFIG, _TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
# Keys of the auto_map in config.json that belong to the tokenizer.
_OF_TOKENIZER = frozenset({"AutoTokenizer", "AutoProcessor"})


def code_files(source: Path, tokenizer: Path) -> list[Path]:
    """Find the modules that readers of an export will import, as transformers finds them. Local.

    These are the modules that ``auto_map`` names, and the modules in their folder that they import
    relatively. A name in another repository (``owner/repo--module.Class``) is left out.

    Args:
        source: Directory of the checkpoint, with ``config.json``.
        tokenizer: Directory of the tokenizer: that of the checkpoint, or another one, which then
            has the tokenizer's code.

    Raises:
        UsageError: A module is missing or is no Python, or two modules have one name.
    """
    own = _modules(source / _CONFIG)
    if tokenizer.resolve() != source.resolve():
        own = {key: names for key, names in own.items() if key not in _OF_TOKENIZER}
    found: dict[str, Path] = {}
    for config, maps in (
        (source / _CONFIG, own),
        (tokenizer / _TOKENIZER_CONFIG, _modules(tokenizer / _TOKENIZER_CONFIG)),
    ):
        for name in (name for names in maps.values() for name in names):
            for path in _with_imports(config.parent / f"{name}.py", f"auto_map of {config}"):
                other = found.setdefault(path.name, path)
                if other.read_bytes() != path.read_bytes():
                    raise UsageError(
                        f"{other} and {path} would both become {path.name} of an export; rename "
                        "one of the two, and the modules that import it"
                    )
    return list(found.values())


def _modules(config: Path) -> dict[str, list[str]]:
    """Map every key of ``auto_map`` to the modules that it names."""
    if not config.is_file():
        return {}
    try:
        auto_map: Any = json.loads(config.read_text(encoding="utf-8")).get("auto_map", {})
    except (ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"{config}: no JSON object: {error}") from error
    if not isinstance(auto_map, dict):  # the form that transformers before 4.27 wrote
        auto_map = {"AutoTokenizer": auto_map}
    found = {key: [*_local_modules(value)] for key, value in auto_map.items()}
    for name in (name for names in found.values() for name in names):
        if not name or Path(name).name != name:
            raise UsageError(
                f"{config}: auto_map names the module {name!r}, which is no file of its directory; "
                "copy the file again, or take the key auto_map out if transformers knows the model "
                "by itself"
            )
    return found


def _local_modules(value: Any) -> Iterator[str]:
    """Yield modules of ``"module.Class"``, or of ``[slow, fast]`` tokenizers, one maybe null."""
    for reference in value if isinstance(value, list) else [value]:
        if isinstance(reference, str) and "--" not in reference:
            yield reference.partition(".")[0]


def _with_imports(first: Path, named_by: str) -> list[Path]:
    """Find a module and all modules of its folder that it needs.

    Raises:
        UsageError: A module is missing, or is no Python; ``named_by`` says who needs the first.
    """
    found: dict[Path, str] = {}
    open_files = [(first, named_by)]
    while open_files:
        path, wanted_by = open_files.pop()
        if path in found:
            continue
        if not path.is_file():
            raise UsageError(
                f"{path} is missing, which {wanted_by} names: the exported model could not be read "
                "with it; copy it from where the checkpoint came from, or take the key auto_map "
                "out if transformers knows the model by itself"
            )
        found[path] = wanted_by
        open_files += [(path.parent / f"{name}.py", str(path)) for name in _relative_imports(path)]
    return list(found)


def _relative_imports(path: Path) -> Iterator[str]:
    """Yield the modules of the same folder that a module imports, as written behind the dot."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested
        raise UsageError(f"{path} is no Python: {error}; copy it again") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = "." * (node.level - 1)
            if node.module:
                yield f"{above}{node.module}"
            else:
                yield from (f"{above}{alias.name}" for alias in node.names)
