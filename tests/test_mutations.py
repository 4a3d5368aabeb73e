"""The table of planted faults fits the code; ``python tests/mutations.py`` runs it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutations import ROOT, planted_text, shares
from support.faults import MUTATIONS, Mutation
from support.share import parse_share


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_row_fits_the_code(mutation: Mutation) -> None:
    """The fault can be planted, is still Python, and its test exists."""
    before = (ROOT / "mindspeed_rl" / mutation.file).read_text()
    after = planted_text(mutation, ROOT)
    assert ast.unparse(ast.parse(after)) != ast.unparse(ast.parse(before))
    file, _, function = mutation.test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert function.partition("[")[0] in {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef)
    }


def test_text_that_is_gone_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mindspeed_rl").mkdir()
    (tmp_path / "mindspeed_rl" / "a.py").write_text("x = 1\nx = 1\n")
    for old, count in (("y = 1", 0), ("x = 1", 2)):
        row = Mutation("gone", "a.py", old, "x = 2", "t.py::test")
        with pytest.raises(ValueError, match=f"{count} times, must be once; update the row 'gone'"):
            planted_text(row, tmp_path)


def test_every_test_is_tried_once_without_a_fault() -> None:
    groups = shares(list(MUTATIONS), 2)
    tried = [test for group in groups for test in group]
    assert sorted(tried) == sorted({mutation.test for mutation in MUTATIONS})
    assert len(groups) == 2


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_plant_every_fault_once(count: int) -> None:
    parts = [parse_share("--share", f"{i}/{count}").of(MUTATIONS) for i in range(count)]
    names = [fault.name for part in parts for fault in part]
    assert sorted(names) == sorted(fault.name for fault in MUTATIONS)


@pytest.mark.parametrize("share", ["", "1", "3/3", "-1/2", "0/0", "a/b"])
def test_a_share_that_is_none_is_refused(share: str) -> None:
    with pytest.raises(ValueError, match="give I/N"):
        parse_share("--share", share)
