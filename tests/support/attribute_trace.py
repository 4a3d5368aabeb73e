"""Records which attributes our code reaches on objects of vLLM, in a real run.

``torchrun tests/support/attribute_trace.py FOLDER ENTRY ARGUMENTS`` runs an entry with every
attribute access of mindspeed_rl rewritten, when its modules are imported, to note the class of the
object. Each process writes one JSON file. What is reached through values has no name in the source
that says whose it is; this is how it gets into the snapshot.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import json
import os
import runpy
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_HELPER = "traced_attribute_"
_SEEN: dict[str, set[str]] = defaultdict(set)


def traced_attribute_(value: Any, name: str) -> Any:
    """``value.name``, noted where the object is of another package."""
    if not isinstance(value, (ModuleType, type)) and (owner := _owner(type(value), name)):
        _SEEN[f"{owner.__module__}:{owner.__qualname__}"].add(name)
    return getattr(value, name)


def _owner(kind: type, name: str) -> type | None:
    """The class of another package that gives an attribute; none where torch or we do.

    An attribute that no class has was set on the object, by the class of the object.
    """
    if not any(_foreign(base) for base in kind.__mro__):
        return None
    defined = next((base for base in kind.__mro__ if name in vars(base)), None)
    if defined is not None:
        return defined if _foreign(defined) else None
    by_torch = "torch" in sys.modules and hasattr(sys.modules["torch"].nn.Module(), name)
    return kind if _foreign(kind) and not by_torch else None


def _foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "vllm"


class _Rewrite(ast.NodeTransformer):
    """``x.name`` becomes a call where it is read; names that python mangles stay."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        mangled = node.attr.startswith("__") and not node.attr.endswith("__")
        if not isinstance(node.ctx, ast.Load) or mangled:
            return node
        call = ast.Call(
            ast.Name(_HELPER, ast.Load()), [node.value, ast.Constant(node.attr)], keywords=[]
        )
        return ast.copy_location(call, node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.match_case:
        node.body = [self.visit(statement) for statement in node.body]
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(Path(self.path).read_text(), self.path)
        return compile(ast.fix_missing_locations(_Rewrite().visit(tree)), self.path, "exec")


class _Finder:
    """In front of python's own, for our package only."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] != "mindspeed_rl":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install(folder: Path) -> None:
    """Rewrite modules of ours from now on."""
    assert not any(name.partition(".")[0] == "mindspeed_rl" for name in sys.modules), "too late"
    vars(builtins)[_HELPER] = traced_attribute_  # an entry is run without its loader
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


def write(folder: Path) -> None:
    """What this process has seen."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = {owner: sorted(names) for owner, names in sorted(_SEEN.items())}
    (folder / f"{os.getpid()}.json").write_text(json.dumps(seen))


def collected(folder: Path) -> dict[str, list[str]]:
    """Class -> attributes, of all processes."""
    seen: dict[str, set[str]] = defaultdict(set)
    for file in folder.glob("*.json"):
        for owner, names in json.loads(file.read_text()).items():
            seen[owner] |= set(names)
    return {owner: sorted(names) for owner, names in sorted(seen.items())}


if __name__ == "__main__":
    out, entry, *rest = sys.argv[1:]
    install(Path(out))
    sys.argv = [entry, *rest]
    try:
        runpy.run_module(entry, run_name="__main__", alter_sys=False)
    finally:
        write(Path(out))
