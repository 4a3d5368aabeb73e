"""The interface of ``torch.nn.attention.varlen`` by release of PyTorch, read from sources.

usage: python tests/support/torch_varlen.py                    # of the installed torch
       python tests/support/torch_varlen.py torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl

A wheel comes by ``pip download --no-deps torch==2.11.0``; it is read as an archive and not
imported. ``torch_varlen.json`` has the parameters of the functions that our code calls.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import zipfile
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("torch_varlen.json")
OLDEST = "2.11.0"
MEMBER = "torch/nn/attention/varlen.py"
_CALLED = ("varlen_attn", "_varlen_attn_backward")


@cache
def snapshot() -> dict[str, dict[str, str]]:
    """Release -> function -> its parameters, as its definition has them."""
    found: dict[str, dict[str, str]] = json.loads(PATH.read_text())
    return found


def interface(source: str) -> dict[str, str]:
    """The parameters of the functions that are called, by their names."""
    return {
        node.name: ast.unparse(node.args)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name in _CALLED
    }


def installed_interface() -> dict[str, str]:
    """Of the installed torch, which is not imported for it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations))).parent
    return interface((root / MEMBER).read_text())


def parameters_of(text: str) -> list[str]:
    """The names of parameters, in order."""
    (function,) = ast.parse(f"def f({text}): ...").body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def main(wheels: list[str]) -> None:
    """Add what is asked for to the snapshot."""
    found = dict(snapshot()) if PATH.exists() else {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            found[Path(wheel).name.split("-")[1]] = interface(archive.read(MEMBER).decode())
    if not wheels:
        from importlib.metadata import version

        found[version("torch").partition("+")[0]] = installed_interface()
    PATH.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
