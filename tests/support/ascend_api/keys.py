"""What a version of vLLM-Ascend can be set, from its sources."""

from __future__ import annotations

import ast
from pathlib import Path


def additional_keys(package: Path) -> list[str]:
    """The names that may be keys of ``additional_config``, nested ones without what is above them.

    These are the words and parameters of the file that reads the configuration, some of which are
    no keys, and what other files read straight from it.

    Args:
        package: the folder ``vllm_ascend``.
    """
    keys: set[str] = set()
    for node in ast.walk(_parse(package / "ascend_config.py")):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            keys |= {node.value} if node.value.isidentifier() else set()
        elif isinstance(node, ast.arg):
            keys.add(node.arg)
    for path in package.rglob("*.py"):
        for node in ast.walk(_parse(path)):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("additional_config.get")
                and isinstance(node.args[0], ast.Constant)
            ):
                keys.add(str(node.args[0].value))
    return sorted(keys)


def environment_names(package: Path) -> list[str]:
    """The variables of the table in ``envs.py``, sorted."""
    return sorted(
        key.value
        for node in ast.walk(_parse(package / "envs.py"))
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value.isupper()
    )


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8-sig"))
