"""Our calls stay within what MindSpeed's wrappers of torch can take."""

from __future__ import annotations

import ast

from support.architecture import modules, within

# It wraps torch.distributed.all_reduce and reads the first positional argument.
WRAPPED = "all_reduce"


def test_reductions_give_their_tensor_by_position() -> None:
    seen = [m for m in modules() if f".{WRAPPED}(" in m.text]
    assert len(seen) > 3
    by_keyword = [
        module.at(node, ast.unparse(node))
        for module in seen
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == WRAPPED
        and not node.args
    ]
    assert by_keyword == []


def test_no_reduction_of_double_precision() -> None:
    """It would be reduced in fp32, without a word; HCCL knows no float64."""
    reducing = [m for m in modules() if f".{WRAPPED}(" in m.text and not within(m.name, ("tests",))]
    doubles = [m.name for m in reducing if "torch.float64" in m.text or ".double()" in m.text]
    assert doubles == []
