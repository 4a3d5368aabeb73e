"""What the packages of the version matrix ask for: a snapshot, for tests without a network.

    python tests/support/wheel_requirements.py      # writes wheel_requirements.json anew, by pip

vllm-ascend 0.23.0.post1 is a source distribution, which pip would build; its metadata is that of
the emulator (``tests/ascend/emulator/build.py``), which has to be built before. torch is that of
x86_64 Linux, whose wheel pip reads whole: 0.9 GB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

PATH = Path(__file__).with_suffix(".json")
WHEELS = ("torch==2.10.0", "torch_npu==2.10.0.post4", "vllm-ascend==0.23.0", "vllm==0.23.0",
          "vllm==0.32.0", "megatron-core==0.16.1", "datasets==5.2.0", "transformers==5.5.4",
          "math-verify==0.9.0")  # fmt: skip


def snapshot() -> dict[str, list[str]]:
    """Package and version -> its requirements, without those of extras."""
    found: dict[str, list[str]] = json.loads(PATH.read_text())
    return found


def _asked_by(wheel: str) -> list[str]:
    command = [sys.executable, "-m", "pip", "-q", "install", "--dry-run", "--no-deps",
               "--ignore-installed", "--report", "-", wheel]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (entry,) = json.loads(done.stdout)["install"]
    return list(entry["metadata"].get("requires_dist", []))


def main() -> None:
    """Write the snapshot."""
    from ascend.emulator.build import cache_folder

    found = {wheel: _asked_by(wheel) for wheel in WHEELS}
    (metadata,) = cache_folder().glob("vllm_ascend-*/*.dist-info")
    found["vllm-ascend==0.23.0.post1"] = PathDistribution(metadata).requires or []
    without = {name: [r for r in asked if "extra" not in r] for name, asked in found.items()}
    PATH.write_text(json.dumps(without, indent=1) + "\n")


if __name__ == "__main__":
    main()
