"""Our calls stay within what MindSpeed's wrappers of torch can take."""

from __future__ import annotations

import ast

from support.architecture import Module, modules, within

# It wraps torch.distributed.all_reduce and reads the first positional argument.
WRAPPED = "all_reduce"


def keyword_reductions(module: Module) -> list[str]:
    """Calls of ``all_reduce`` without a positional tensor."""
    return [
        module.at(node, ast.unparse(node))
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == WRAPPED
        and not node.args
    ]


def test_reductions_give_their_tensor_by_position() -> None:
    seen = [m for m in modules() if f".{WRAPPED}(" in m.text]
    assert len(seen) > 3
    assert [call for module in seen for call in keyword_reductions(module)] == []


def test_no_reduction_of_double_precision() -> None:
    """It would be reduced in fp32, without a word; HCCL knows no float64."""
    reducing = [m for m in modules() if f".{WRAPPED}(" in m.text and not within(m.name, ("tests",))]
    doubles = [m.name for m in reducing if "torch.float64" in m.text or ".double()" in m.text]
    assert doubles == []
