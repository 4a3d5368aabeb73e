"""The snapshot: what our code uses of each pinned package, and what each version reads."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from support.ascend_api.keys import additional_keys, environment_names
from support.ascend_api.sources import Sources, Symbol
from support.ascend_api.uses import Use, signature, symbol_key

Snapshot = dict[str, Any]
# vLLM-Ascend -> the vLLM that it runs on.
VLLM_OF = {"0.23": "0.23.0"}
_RECORDS = {
    "EngineArgs": ("vllm.engine.arg_utils", "EngineArgs"),
    "CompilationConfig": ("vllm.config", "CompilationConfig"),
}


def settings(ascend: Sources, vllm: Sources) -> dict[str, list[str]]:
    """What one version can be set: keys, variables, arguments."""
    package = ascend.root / "vllm_ascend"
    found = {
        "additional_config": additional_keys(package),
        "environment": environment_names(package),
    }
    for name, (module, record) in _RECORDS.items():
        symbol = vllm.symbol(module, record)
        assert symbol is not None, f"{module}:{record} is not in {vllm.root}"
        found[name] = sorted(n for n in symbol.members if not n.startswith("_"))
    return found


def lookup(sources: Sources, module: str, path: str) -> Symbol | None:
    """A use in the sources of its package: a module, a name, or a member of a class."""
    parts = path.split(".") if path else []
    if "_C" in parts:
        return Symbol("extension")  # compiled: its sources say nothing
    while parts and sources.module(f"{module}.{parts[0]}") is not None:
        module = f"{module}.{parts.pop(0)}"
    if not parts:
        return Symbol("module") if sources.module(module) is not None else None
    symbol = sources.symbol(module, parts[0])
    if symbol is None or len(parts) == 1:
        return symbol
    if symbol.kind == "value":
        return symbol  # attributes of objects are traced, not read
    if symbol.kind == "class" and parts[1] == "__init__" and symbol.parameters is not None:
        return Symbol("member", symbol.parameters)  # of a record it is made by the decorator
    if symbol.kind != "class" or parts[1] not in symbol.members:
        return None
    text = symbol.members[parts[1]]
    return Symbol("member", text if text and not text.startswith("=") else None)


def patch_targets(mindspeed: Sources, megatron: Sources) -> dict[str, bool]:
    """The names of megatron-core that MindSpeed registers patches for: whether they are there.

    Those that it makes itself are left out.
    """
    found: dict[str, bool] = {}
    for path in sorted((mindspeed.root / "mindspeed").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8-sig"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            target = node.args[0]
            made = any(
                k.arg == "create_dummy" and getattr(k.value, "value", False) for k in node.keywords
            )
            if (
                ast.unparse(node.func).endswith("register_patch")
                and isinstance(target, ast.Constant)
                and str(target.value).startswith("megatron.core")
                and not made
            ):
                name = str(target.value)
                found[name] = (
                    lookup(megatron, "megatron", name.removeprefix("megatron.")) is not None
                )
    return dict(sorted(found.items()))


def symbols(
    uses: Iterable[Use],
    traced: Mapping[str, Mapping[str, list[str]]],
    sources: Mapping[str, Sources],
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Entries of all uses by package, and what is missing.

    Args:
        uses: from our code.
        traced: package -> class, as ``module:Class`` -> attributes that a run reached.
        sources: by package.
    """
    found: dict[str, dict[str, Any]] = {package: {} for package in sources}
    missing: list[str] = []
    for use in uses:
        for package in use.packages:
            if package not in sources:
                continue
            key = symbol_key(use.module, use.path)
            symbol = lookup(sources[package], use.module, use.path)
            if symbol is None:
                missing.append(f"{use.where}: {package} has no {key}")
            else:
                found[package][key] = _entry(symbol)
    for package, classes in traced.items():
        for owner, attributes in classes.items():
            module, _, name = owner.partition(":")
            for attribute in attributes:
                key = f"{owner}.{attribute}"
                symbol = lookup(sources[package], module, f"{name}.{attribute}")
                if symbol is None:
                    missing.append(f"traced: {package} has no {key}")
                else:
                    found[package][key] = _entry(symbol)
    return {p: dict(sorted(entries.items())) for p, entries in found.items()}, missing


def _entry(symbol: Symbol) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": symbol.kind}
    if symbol.parameters is not None:
        entry["parameters"] = symbol.parameters
    return entry


def difference(old: Snapshot, new: Snapshot) -> list[str]:
    """What changed, one line each: symbols, their parameters and defaults, keys."""
    lines: list[str] = []
    for package in sorted({*old["packages"], *new["packages"]}):
        before, after = (s["packages"].get(package, {}) for s in (old, new))
        for key in sorted({*before, *after}):
            lines += [
                f"{package}: {line}" for line in _changes(key, before.get(key), after.get(key))
            ]
    for column in sorted({*old["settings"], *new["settings"]}):
        before, after = (s["settings"].get(column, {}) for s in (old, new))
        for part in sorted({*before, *after}):
            gone = sorted({*before.get(part, [])} - {*after.get(part, [])})
            come = sorted({*after.get(part, [])} - {*before.get(part, [])})
            lines += [f"vllm-ascend {column}: {part}: removed {name}" for name in gone]
            lines += [f"vllm-ascend {column}: {part}: added {name}" for name in come]
    return lines


def _changes(key: str, old: dict[str, Any] | None, new: dict[str, Any] | None) -> list[str]:
    if old is None:
        return [f"added {key}"]
    if new is None:
        return [f"removed {key}"]
    if old["kind"] != new["kind"]:
        return [f"{key}: was a {old['kind']}, is a {new['kind']}"]
    before, after = (_named(entry.get("parameters")) for entry in (old, new))
    lines = [f"{key}: parameter {name} removed" for name in before if name not in after]
    lines += [f"{key}: parameter {name} added" for name in after if name not in before]
    lines += [
        f"{key}: default of {name} was {before[name]}, is {after[name]}"
        for name in before
        if name in after and before[name] != after[name]
    ]
    if not lines and list(before) != list(after):
        lines.append(f"{key}: parameters are in another order")
    return lines


def _named(text: str | None) -> dict[str, str]:
    """Parameter -> default."""
    if text is None:
        return {}
    parts = text.split(", ") if text else []
    return {name: value or "none" for name, _, value in (p.partition("=") for p in parts)}


def relied_defaults(
    uses: Iterable[Use], packages: Mapping[str, Mapping[str, dict[str, Any]]]
) -> dict[str, dict[str, dict[str, str]]]:
    """The defaults that calls of ours leave as they are: package -> symbol -> parameter."""
    relied: dict[str, dict[str, dict[str, str]]] = {}
    for use in uses:
        for package in use.packages:
            key = symbol_key(use.module, use.path)
            text = packages.get(package, {}).get(key, {}).get("parameters")
            if not use.call or text is None or use.positional < 0 or "**" in use.keywords:
                continue
            arguments = signature(text)
            plain = [a.arg for a in [*arguments.posonlyargs, *arguments.args]]
            plain = plain[1:] if plain[:1] in (["self"], ["cls"]) else plain
            given = {*plain[: use.positional], *use.keywords}
            for name, default in _named(text).items():
                if default != "none" and name not in given and not name.startswith("*"):
                    relied.setdefault(package, {}).setdefault(key, {})[name] = default
    return {
        package: {key: dict(sorted(names.items())) for key, names in sorted(keys.items())}
        for package, keys in sorted(relied.items())
    }


def changed_defaults(snapshot: Snapshot, uses: Iterable[Use]) -> list[str]:
    """Defaults that our calls rely on and that are not what they were when they were written."""
    now = relied_defaults(uses, snapshot["packages"])
    return [
        f"{package}: {key}: default of {name} was {was}, is {now[package][key][name]}"
        for package, keys in snapshot["relied_defaults"].items()
        for key, names in keys.items()
        for name, was in names.items()
        if now.get(package, {}).get(key, {}).get(name, was) != was
    ]


def write(path: Path, snapshot: Snapshot) -> None:
    """One line per entry, so that a version control diff reads well."""
    lines = ["{"]
    for number, (part, content) in enumerate(snapshot.items()):
        lines.append(f'"{part}": {{')
        groups = []
        for name, entries in content.items():
            rows = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items()]
            groups.append(f" {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n }")
        lines.append(",\n".join(groups))
        lines.append("}" + ("," if number + 1 < len(snapshot) else ""))
    path.write_text("\n".join([*lines, "}"]) + "\n")
