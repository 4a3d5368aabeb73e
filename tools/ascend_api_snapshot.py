"""Writes the snapshot of the interfaces that we use of other packages, or prints what changed.

usage: python tools/ascend_api_snapshot.py --sources DIR [--write] [--trace FILE]

DIR holds one folder per package and version with its Python sources, by the names of the snapshot
with a dash: ``vllm-0.23.0/vllm``, ``vllm-ascend-main/vllm_ascend``, ``torch_npu-2.10.0.post4/
torch_npu``, ``megatron-core-0.16.1/megatron``, ``mindspeed-core_r0.16.0/mindspeed``. Wheels are
unpacked with unzip; nothing is imported, so that no wheel has to fit this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.ascend_api import snapshot as snap  # noqa: E402
from tools.ascend_api.sources import Sources  # noqa: E402
from tools.ascend_api.uses import problems, uses_of  # noqa: E402

TARGET = ROOT / "tests" / "support" / "ascend_api.json"
PACKAGES = {
    "vllm 0.32.0": "vllm",
    "vllm 0.23.0": "vllm",
    "vllm-ascend 0.23.0": "vllm_ascend",
    "torch_npu 2.10.0.post4": "torch_npu",
    "megatron-core 0.16.1": "megatron",
    "mindspeed core_r0.16.0": "mindspeed",
}


def take(root: Path, traced: dict[str, dict[str, list[str]]]) -> tuple[snap.Snapshot, list[str]]:
    """The snapshot of the sources below ``root``, and uses that they do not have."""
    uses = list(uses_of(ROOT / "mindspeed_rl"))
    sources = {
        name: Sources(root / name.replace(" ", "-"), package) for name, package in PACKAGES.items()
    }
    packages, missing = snap.symbols(uses, traced, sources)
    settings = {
        column: snap.settings(
            Sources(_ascend(root, column), "vllm_ascend"), Sources(root / f"vllm-{vllm}", "vllm")
        )
        for column, vllm in snap.VLLM_OF.items()
    }
    targets = snap.patch_targets(sources["mindspeed core_r0.16.0"], sources["megatron-core 0.16.1"])
    taken = {
        "settings": settings,
        "packages": packages,
        "traced": traced,
        "patch_targets": {"megatron-core 0.16.1": targets},
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
    parser.add_argument("--sources", type=Path, required=True, help="folder of unpacked sources")
    parser.add_argument("--trace", type=Path, help="attributes that a run reached, as JSON")
    parser.add_argument("--write", action="store_true", help="replace the committed snapshot")
    args = parser.parse_args()
    old = json.loads(TARGET.read_text()) if TARGET.is_file() else {"settings": {}, "packages": {}}
    traced = json.loads(args.trace.read_text()) if args.trace else old.get("traced", {})
    new, missing = take(args.sources, traced)
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
