"""Interfaces of packages, read from their sources by AST: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_MAX_DEFAULT = 40
_MAX_HOPS = 8


@dataclass(frozen=True, slots=True)
class Symbol:
    """One name of a module.

    Attributes:
        kind: ``function``, ``class`` or ``value``.
        parameters: of a function, or of a class's constructor, as in its definition without
            annotations; ``None`` where it is not known.
        members: of a class, its own and inherited: name -> parameters of a method, ``None`` for
            attributes and properties.
    """

    kind: str
    parameters: str | None = None
    members: dict[str, str | None] = field(default_factory=dict)


class Sources:
    """One package tree.

    Args:
        root: the folder that holds ``package``.
        package: its top name.
    """

    def __init__(self, root: Path, package: str) -> None:
        self.root, self.package = root, package
        self._trees: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """The parsed module; ``None`` where there is none."""
        if name not in self._trees:
            base = self.root.joinpath(*name.split("."))
            paths = (base.with_name(base.name + ".py"), base / "__init__.py")
            path = next((p for p in paths if p.is_file()), None)
            text = path.read_text(encoding="utf-8-sig") if path else ""
            # a folder without __init__ is a package with nothing of its own
            self._trees[name] = ast.parse(text) if path or base.is_dir() else None
        return self._trees[name]

    def is_package(self, name: str) -> bool:
        """Whether relative imports of a module start at itself."""
        return self.root.joinpath(*name.split("."), "__init__.py").is_file()

    def symbol(self, module: str, name: str) -> Symbol | None:
        """A name of a module, through re-exports within the package."""
        found = self._find(module, name, 0)
        return self._described(*found) if found else None

    def _find(self, module: str, name: str, hops: int) -> tuple[str, ast.AST] | None:
        """The module that defines a name, and its definition."""
        tree = self.module(module)
        if tree is None or hops > _MAX_HOPS:
            return None
        aliased: list[tuple[str, str]] = []
        stars: list[str] = []
        for node in _statements(tree.body):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if node.name == name:
                    return module, node
            elif isinstance(node, ast.ImportFrom):
                source = self._absolute(module, node)
                aliased += [(source, a.name) for a in node.names if (a.asname or a.name) == name]
                stars += [source for a in node.names if a.name == "*"]
            elif isinstance(node, ast.Import):
                if any((a.asname or a.name).split(".")[0] == name for a in node.names):
                    return module, node
            elif name in _assigned(node):
                return module, node
        aliased += [(f"{module}{m}" if m.startswith(".") else m, n) for m, n in _lazy(tree, name)]
        for source, original in [*aliased, *[(star, name) for star in stars]]:
            if found := self._find(source, original, hops + 1):
                return found
            if self.module(f"{source}.{original}") is not None:
                return source, ast.Import(names=[ast.alias(original)])
        if aliased:
            return module, ast.Import(names=[ast.alias(name)])  # of another package
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        keep = len(parts) - node.level + self.is_package(module)
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])

    def _described(self, module: str, node: ast.AST) -> Symbol:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return Symbol("function", parameters(node.args))
        if not isinstance(node, ast.ClassDef):
            return Symbol("value")
        members: dict[str, str | None] = {}
        fields: dict[str, str] = {}
        for _, inherited in reversed(list(self._lineage(module, node))):
            members |= _members(inherited)
            if _is_record(inherited):
                fields |= _fields(inherited)
        init = members.get("__init__")
        if init is None and fields:
            init = ", ".join(name + text for name, text in fields.items())
        return Symbol("class", init, members)

    def _lineage(
        self, module: str, node: ast.ClassDef, seen: frozenset[str] = frozenset()
    ) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and its bases, nearest first."""
        yield module, node
        for base in node.bases:
            name = ast.unparse(base).partition("[")[0]
            if name in seen:
                continue
            owner, _, last = name.rpartition(".")
            found = self._find(module, last, 0) if not owner else None
            if found and isinstance(found[1], ast.ClassDef):
                yield from self._lineage(*found, seen | {name})


def parameters(arguments: ast.arguments) -> str:
    """A parameter list without annotations, defaults cut where they are long."""
    parts: list[str] = []
    plain = [*arguments.posonlyargs, *arguments.args]
    given = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(plain, given, strict=True):
        parts.append(argument.arg + _default(default))
    if arguments.vararg:
        parts.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        parts.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(argument.arg + _default(default))
    if arguments.kwarg:
        parts.append(f"**{arguments.kwarg.arg}")
    return ", ".join(parts)


def _default(node: ast.expr | None) -> str:
    if node is None or _is_field_without_default(node):
        return ""
    text = " ".join(ast.unparse(node).split())
    return "=" + (text if len(text) <= _MAX_DEFAULT and "," not in text else "...")


def _is_field_without_default(node: ast.expr) -> bool:
    """Whether it is a call of ``dataclasses.field`` for a field that must be given."""
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] == "field"
        and not {"default", "default_factory"} & {word.arg for word in node.keywords}
    )


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a module, those under conditions included."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                for inner in getattr(node, part, []):
                    yield from _statements(
                        inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    )


def _assigned(node: ast.stmt) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}


def _lazy(tree: ast.Module, name: str) -> Iterator[tuple[str, str]]:
    """``{"LLM": ".entrypoints.llm:LLM"}``, which a module's ``__getattr__`` reads."""
    for node in _statements(tree.body):
        value = getattr(node, "value", None)
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(value, ast.Dict):
            continue
        for key, target in zip(value.keys, value.values, strict=True):
            if (
                isinstance(key, ast.Constant)
                and key.value == name
                and isinstance(target, ast.Constant)
                and isinstance(target.value, str)
                and ":" in target.value
            ):
                module, _, original = target.value.partition(":")
                yield module, original


def _is_record(node: ast.ClassDef) -> bool:
    """A dataclass, or a structure whose annotations are its constructor."""
    decorators = " ".join(ast.unparse(d) for d in node.decorator_list)
    bases = " ".join(ast.unparse(b) for b in node.bases)
    return any(w in decorators for w in ("dataclass", "config")) or any(
        w in bases for w in ("Struct", "BaseModel", "NamedTuple")
    )


def _fields(node: ast.ClassDef) -> dict[str, str]:
    return {
        item.target.id: _default(item.value)
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and "ClassVar" not in ast.unparse(item.annotation)
    }


def _members(node: ast.ClassDef) -> dict[str, str | None]:
    """Methods with their parameters, attributes of the class and of self."""
    found: dict[str, str | None] = {
        inner.attr: None
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }
    for item in node.body:
        found |= dict.fromkeys(_assigned(item))
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            read = any("property" in ast.unparse(d) for d in item.decorator_list)
            found[item.name] = None if read else parameters(item.args)
    return found


def lookup(sources: Sources, module: str, path: str) -> Symbol | None:
    """A use in the sources of its package: a module, a name, or a member of a class."""
    parts = path.split(".") if path else []
    if "_C" in parts:
        return Symbol("extension")  # compiled: its sources say nothing
    while parts and sources.module(f"{module}.{parts[0]}") is not None:
        module = f"{module}.{parts.pop(0)}"
    if not parts or parts[0] == "__path__":
        return Symbol("module") if sources.module(module) is not None else None
    symbol = sources.symbol(module, parts[0])
    if symbol is None or len(parts) == 1 or symbol.kind == "value":
        return symbol  # attributes of objects are traced, not read
    if symbol.kind == "class" and parts[1] == "__init__" and symbol.parameters is not None:
        return Symbol("member", symbol.parameters)  # of a record it is made by the decorator
    return Symbol("member", symbol.members[parts[1]]) if parts[1] in symbol.members else None


def interface(keys: Iterable[str], sources: Sources) -> dict[str, str | None]:
    """Parameters by key, ``module:name`` or ``module:Class.member``, of what there is."""
    found = {key: lookup(sources, *key.partition(":")[::2]) for key in sorted(set(keys))}
    return {key: symbol.parameters for key, symbol in found.items() if symbol is not None}
