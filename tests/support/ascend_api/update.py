"""Writes the snapshot of the interfaces that we use; the difference is that of version control.

usage: python tests/support/ascend_api/update.py [--sources DIR] [--trace FOLDER]

After a new use of ours, without DIR: what is in the emulator's cache is read anew, the rest stays.
For new versions, DIR holds a folder per package with its Python sources, by the names below with a
dash: ``vllm-0.23.0/vllm``, ``torch_npu-2.10.0.post4/torch_npu``, ``mindspeed-core_r0.16.0/
mindspeed``. Wheels are unpacked with unzip; nothing is imported, so that no wheel has to fit this
machine. FOLDER is what ``tests/support/attribute_trace.py`` wrote.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from ascend.emulator.build import ASCEND_FOLDER, cache_folder  # noqa: E402
from support.ascend_api import PATH, snapshot  # noqa: E402
from support.ascend_api.sources import Sources, interface  # noqa: E402
from support.ascend_api.uses import problems, uses_of  # noqa: E402
from support.attribute_trace import collected  # noqa: E402

PACKAGES = {
    "vllm 0.23.0": "vllm",
    "vllm-ascend 0.23.0": "vllm_ascend",
    "torch_npu 2.10.0.post4": "torch_npu",
    "mindspeed core_r0.16.0": "mindspeed",
}
CACHED = ("vllm 0.23.0", "vllm-ascend 0.23.0")  # the emulator's torch_npu is another version


def located(folder: Path | None) -> dict[str, Sources]:
    """Packages whose sources are at hand."""
    found = {}
    for name, package in PACKAGES.items():
        cached = ASCEND_FOLDER if package == "vllm_ascend" else package
        root = folder / name.replace(" ", "-") if folder else cache_folder() / cached
        if (folder or name in CACHED) and (root / package).is_dir():
            found[name] = Sources(root, package)
    return found


def settings(ascend: Sources, vllm: Sources) -> dict[str, list[str]]:
    """What an engine can be set: names that may be keys, variables, arguments.

    Keys of ``additional_config`` are the words and parameters of the file that reads it, some of
    which are no keys, and what other files read straight from it.
    """
    package = ascend.root / "vllm_ascend"
    nodes = list(_nodes(package / "ascend_config.py"))
    words = {node.value for node in nodes if isinstance(node, ast.Constant)}
    keys = {word for word in words if isinstance(word, str) and word.isidentifier()}
    keys |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for path in package.rglob("*.py"):
        keys |= {
            str(node.args[0].value)
            for node in _nodes(path)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("additional_config.get")
            and isinstance(node.args[0], ast.Constant)
        }
    variables = {
        key.value
        for node in _nodes(package / "envs.py")
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and str(key.value).isupper()
    }
    found = {"additional_config": sorted(keys), "environment": sorted(variables)}
    records = {"EngineArgs": "vllm.engine.arg_utils", "CompilationConfig": "vllm.config"}
    for name, module in records.items():
        record = vllm.symbol(module, name)
        assert record is not None
        found[name] = sorted(member for member in record.members if not member.startswith("_"))
    return found


def patch_targets(mindspeed: Sources) -> list[str]:
    """The names of megatron-core that MindSpeed registers patches for and does not make itself."""
    return sorted(
        {
            str(node.args[0].value)
            for path in (mindspeed.root / "mindspeed").rglob("*.py")
            for node in _nodes(path)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("register_patch")
            and isinstance(node.args[0], ast.Constant)
            and str(node.args[0].value).startswith("megatron.core")
            and not any(k.arg == "create_dummy" and ast.unparse(k.value) == "True"
                        for k in node.keywords)
        }
    )  # fmt: skip


def _nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8-sig")))


def taken(sources: dict[str, Sources], trace: dict[str, list[str]]) -> dict[str, Any]:
    """The snapshot of the sources at hand; what there are none of stays as it was."""
    old, uses = snapshot(), list(uses_of(ROOT / "mindspeed_rl"))
    traced = dict(old["traced"])
    if trace:
        traced["vllm 0.23.0"] = [f"{owner}.{name}" for owner, ns in trace.items() for name in ns]
    new = {"settings": old["settings"], "packages": dict(old["packages"]), "traced": traced,
           "patch_targets": old["patch_targets"]}  # fmt: skip
    for name, package in sources.items():
        keys = [use.key for use in uses if name in use.packages]
        new["packages"][name] = interface([*keys, *traced.get(name, [])], package)
    if all(name in sources for name in CACHED):
        new["settings"] = settings(sources["vllm-ascend 0.23.0"], sources["vllm 0.23.0"])
    if "mindspeed core_r0.16.0" in sources:
        new["patch_targets"] = patch_targets(sources["mindspeed core_r0.16.0"])
    return new


def main() -> None:
    """Write the snapshot; say which uses of ours do not fit it."""
    parser = argparse.ArgumentParser(description="Snapshot of the interfaces that we use.")
    parser.add_argument("--sources", type=Path, help="folder of unpacked sources")
    parser.add_argument("--trace", type=Path, help="folder of a trace of attributes")
    args = parser.parse_args()
    new = taken(located(args.sources), collected(args.trace) if args.trace else {})
    PATH.write_text(json.dumps(new, indent=1) + "\n")
    print(*problems(uses_of(ROOT / "mindspeed_rl"), new["packages"]), sep="\n")


if __name__ == "__main__":
    main()
