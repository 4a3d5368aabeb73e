"""The keys that a version of vLLM-Ascend reads from ``additional_config``, from its sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_ROOT = "additional_config"


def additional_keys(package: Path) -> list[str]:
    """All keys, nested ones dotted, sorted.

    A key is read by ``config.get("key")``, ``config["key"]``, ``"key" in config``, a helper with
    the dictionary and the name among its arguments, a class that the dictionary is unpacked into,
    or a table of defaults of such a class.

    Args:
        package: the folder ``vllm_ascend``.
    """
    keys: set[str] = set()
    tree = _parse(package / "ascend_config.py")
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    _read_class(classes["AscendConfig"], {_ROOT: ""}, classes, keys)
    for path in sorted(package.rglob("*.py")):
        if path.name != "ascend_config.py":
            keys |= _loose_keys(_parse(path))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            keys |= _loose_keys(node)
    return sorted(keys)


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8-sig"))


def environment_names(package: Path) -> list[str]:
    """The variables of the table in ``envs.py``, sorted."""
    tree = _parse(package / "envs.py")
    return sorted(
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value.isupper()
    )


def _read_class(
    class_node: ast.ClassDef,
    dictionaries: dict[str, str],
    classes: dict[str, ast.ClassDef],
    keys: set[str],
) -> None:
    """Keys of the dictionaries that a class is given, and of the classes that it builds.

    ``dictionaries``: local name -> dotted prefix of what it holds.
    """
    names = dict(dictionaries)
    for node in ast.walk(class_node):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = ast.unparse(node.targets[0])
            for prefix, key in _reads(node.value, names):
                names.setdefault(target, f"{prefix}{key}.")
    for node in ast.walk(class_node):
        for prefix, key in _reads(node, names, nested=False):
            keys.add(prefix + key)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            _read_built(node, names, classes, keys)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            _read_method(class_node, node, names, keys)
    for node in class_node.body:
        _read_defaults(node, dictionaries, keys)


def _read_built(
    call: ast.Call, names: dict[str, str], classes: dict[str, ast.ClassDef], keys: set[str]
) -> None:
    """A class of the file that is built from a dictionary, as an argument or unpacked."""
    assert isinstance(call.func, ast.Name)
    built = classes.get(call.func.id)
    if built is None:
        return
    init = next(
        (n for n in built.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None
    )
    if init is None:
        return
    parameters = [a.arg for a in init.args.args[1:]]
    for position, argument in enumerate(call.args):
        prefix = _prefix_of(argument, names)
        if prefix is not None and position < len(parameters):
            _read_class(built, {parameters[position]: prefix}, classes, keys)
    for keyword in call.keywords:
        prefix = _prefix_of(keyword.value, names)
        if prefix is None:
            continue
        if keyword.arg is not None:
            _read_class(built, {keyword.arg: prefix}, classes, keys)
            continue
        keys |= {prefix + name for name in parameters}
        keys |= {prefix + a.arg for a in init.args.kwonlyargs}
        if init.args.kwarg is not None:
            _read_class(built, {init.args.kwarg.arg: prefix}, classes, keys)


def _read_method(
    owner: ast.ClassDef, call: ast.Call, names: dict[str, str], keys: set[str]
) -> None:
    """A method of the same class that a dictionary is handed to."""
    assert isinstance(call.func, ast.Attribute)
    if ast.unparse(call.func.value) != "self":
        return
    for method in owner.body:
        if not isinstance(method, ast.FunctionDef) or method.name != call.func.attr:
            continue
        parameters = [a.arg for a in method.args.args[1:]]
        given = {
            parameters[i]: prefix
            for i, argument in enumerate(call.args[: len(parameters)])
            if (prefix := _prefix_of(argument, names)) is not None
        }
        for node in ast.walk(method):
            keys |= {prefix + key for prefix, key in _reads(node, given, nested=False)}


def _read_defaults(node: ast.stmt, dictionaries: dict[str, str], keys: set[str]) -> None:
    """``_defaults = {...}``: the class takes exactly these keys."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Dict):
        return
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    if "defaults" not in ast.unparse(target).lower():
        return
    for prefix in dictionaries.values():
        keys |= {
            prefix + key.value
            for key in node.value.keys
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        }


def _prefix_of(node: ast.expr, names: dict[str, str]) -> str | None:
    """The prefix of an expression that is a dictionary: a name, or read from another one."""
    if ast.unparse(node) in names:
        return names[ast.unparse(node)]
    found = next(_reads(node, names, nested=False), None)
    return f"{found[0]}{found[1]}." if found else None


def _reads(node: ast.AST, names: dict[str, str], nested: bool = True) -> Iterator[tuple[str, str]]:
    """Prefix and key of every read of a known dictionary in an expression."""
    for inner in ast.walk(node) if nested else [node]:
        if isinstance(inner, ast.Call):
            texts = [
                a.value
                for a in inner.args
                if isinstance(a, ast.Constant) and isinstance(a.value, str)
            ]
            name = inner.func.attr if isinstance(inner.func, ast.Attribute) else ""
            if name == "get" and isinstance(inner.func, ast.Attribute) and texts:
                owner = ast.unparse(inner.func.value)
                if owner in names:
                    yield names[owner], texts[0]
            elif name.startswith("_get_config_value") and texts:
                for argument in inner.args:
                    if ast.unparse(argument) in names:
                        yield names[ast.unparse(argument)], texts[0]
        elif isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant):
            owner = ast.unparse(inner.value)
            if owner in names and isinstance(inner.slice.value, str):
                yield names[owner], inner.slice.value


def _loose_keys(tree: ast.AST) -> set[str]:
    """Keys that other files read straight from the configuration."""
    found = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and ast.unparse(node.func.value).endswith(_ROOT)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            found.add(node.args[0].value)
    return found
