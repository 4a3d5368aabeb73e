"""The table of claims about NPUs: its evidence exists, and the document shows it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from ascend_grades import CLAIMS, Grade, document  # noqa: E402


def test_every_claim_but_the_unverified_has_a_test_that_exists() -> None:
    for claim in CLAIMS:
        file, _, name = claim.evidence.partition("::")
        if claim.grade is Grade.UNVERIFIED:
            assert claim.limits, f"{claim.what}: say why it is unverified"
            continue
        assert claim.grade is not Grade.EMULATED or file.startswith("tests/ascend/"), claim.what
        tree = ast.parse((ROOT / file).read_text())
        assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, claim.evidence


def test_nothing_is_called_executed_on_hardware_without_evidence() -> None:
    hardware = [claim for claim in CLAIMS if claim.grade is Grade.HARDWARE]
    assert all(claim.evidence.startswith("tests/device/") for claim in hardware)


def test_the_document_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "tools/ascend_grades.py", "--check"], cwd=ROOT, capture_output=True,
        text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert document("a\n<!-- grades: written by tools/ascend_grades.py -->\nold\n"
                    "<!-- end of grades -->\nb\n").startswith("a\n")  # fmt: skip
