"""Writes the snapshot of the interfaces that we use of other packages, or prints what changed.

usage: python tests/support/ascend_api/update.py [--sources DIR] [--write] [--trace FILE]

After a new use of ours, without DIR: entries of the packages that are installed or in the
emulator's cache are read anew, the others stay. For new versions, with DIR:

DIR holds one folder per package and version with its Python sources, by the names of the snapshot
with a dash: ``vllm-0.23.0/vllm``, ``vllm-ascend-main/vllm_ascend``, ``torch_npu-2.10.0.post4/
torch_npu``, ``megatron-core-0.16.1/megatron``, ``mindspeed-core_r0.16.0/mindspeed``; what is not
there stays as it was. Wheels are unpacked with unzip; nothing is imported, so that no wheel has to
fit this machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.ascend_api import PATH as TARGET  # noqa: E402
from support.ascend_api import entries as snap  # noqa: E402
from support.ascend_api.sources import Sources  # noqa: E402
from support.ascend_api.uses import problems, uses_of  # noqa: E402

INSTALLED = ("vllm 0.32.0", "megatron-core 0.16.1")
CACHED = ("vllm 0.23.0", "vllm-ascend 0.23.0")
PACKAGES = {
    "vllm 0.32.0": "vllm",
    "vllm 0.23.0": "vllm",
    "vllm-ascend 0.23.0": "vllm_ascend",
    "torch_npu 2.10.0.post4": "torch_npu",
    "megatron-core 0.16.1": "megatron",
    "mindspeed core_r0.16.0": "mindspeed",
}


def located(root: Path | None) -> dict[str, Sources]:
    """The sources that are at hand: below ``root``, installed, or in the emulator's cache."""
    found: dict[str, Path] = {}
    for name in PACKAGES:
        if root is not None:
            found[name] = root / name.replace(" ", "-")
        elif name in INSTALLED:
            spec = importlib.util.find_spec(PACKAGES[name])
            places = list(spec.submodule_search_locations or []) if spec else []
            found[name] = Path(places[0]).parent if places else Path("not installed")
        elif name in CACHED:
            found[name] = cache_folder() / PACKAGES[name]
    return {
        name: Sources(path, PACKAGES[name])
        for name, path in found.items()
        if (path / PACKAGES[name]).is_dir()
    }


def cache_folder() -> Path:
    """Where ``tests/ascend/run.sh`` unpacks wheels."""
    if asked := os.environ.get("MINDSPEED_RL_ASCEND_CACHE"):
        return Path(asked)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mindspeed_rl" / "ascend"


def take(
    root: Path | None, old: snap.Snapshot, traced: dict[str, dict[str, list[str]]]
) -> tuple[snap.Snapshot, list[str]]:
    """The snapshot of the sources at hand, and uses that they do not have.

    What no source is at hand for stays as it was.
    """
    uses = list(uses_of(ROOT / "mindspeed_rl"))
    sources = located(root)
    packages, missing = snap.symbols(uses, {p: traced[p] for p in traced if p in sources}, sources)
    packages = {name: packages.get(name, old["packages"].get(name, {})) for name in PACKAGES}
    settings, targets = dict(old["settings"]), old["patch_targets"]
    for column, vllm in snap.VLLM_OF.items() if root else ():
        assert root is not None
        pair = (_ascend(root, column), root / f"vllm-{vllm}")
        if all(path.is_dir() for path in pair):
            settings[column] = snap.settings(
                Sources(pair[0], "vllm_ascend"), Sources(pair[1], "vllm")
            )
    pinned = ("mindspeed core_r0.16.0", "megatron-core 0.16.1")
    if root and all(name in sources for name in pinned):
        targets = {pinned[1]: snap.patch_targets(*(sources[name] for name in pinned))}
    taken = {
        "settings": settings,
        "packages": packages,
        "traced": traced,
        "patch_targets": targets,
        "relied_defaults": snap.relied_defaults(uses, packages),
    }
    return taken, missing


def _ascend(root: Path, column: str) -> Path:
    """``0.23`` is in ``vllm-ascend-0.23.0``."""
    full = column if column == "main" or column.count(".") == 2 else f"{column}.0"
    return root / f"vllm-ascend-{full}"


def main() -> None:
    """Print the difference to the committed snapshot; with ``--write`` replace it."""
    parser = argparse.ArgumentParser(description="Snapshot of the interfaces that we use.")
    parser.add_argument("--sources", type=Path, help="folder of unpacked sources")
    parser.add_argument("--trace", type=Path, help="attributes that a run reached, as JSON")
    parser.add_argument("--write", action="store_true", help="replace the committed snapshot")
    args = parser.parse_args()
    empty: snap.Snapshot = {"settings": {}, "packages": {}, "patch_targets": {}}
    old = json.loads(TARGET.read_text()) if TARGET.is_file() else empty
    traced = json.loads(args.trace.read_text()) if args.trace else old.get("traced", {})
    new, missing = take(args.sources, old, traced)
    for line in [*snap.difference(old, new), *missing]:
        print(line)
    found = problems(uses_of(ROOT / "mindspeed_rl"), new["packages"])
    compiled = [
        k for e in new["packages"].values() for k, v in e.items() if v["kind"] == "extension"
    ]
    print(*compiled, f"{len(compiled)} names of compiled modules are not read", sep="\n")
    targets = new["patch_targets"]["megatron-core 0.16.1"]
    print(
        *(n for n, there in targets.items() if not there),
        f"of {len(targets)} patch targets of MindSpeed are not in megatron-core",
        sep="\n",
    )
    print(*found, f"{len(found)} uses of ours do not fit these sources", sep="\n")
    if args.write:
        snap.write(TARGET, new)
        print(f"{TARGET.relative_to(ROOT)}: {TARGET.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
