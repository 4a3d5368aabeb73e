"""The architecture as a test: who may import what, read from the syntax tree of every module.

Data flows one way and heavy libraries have one home each. A failure names file, line and rule.
"""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from support.architecture import (
    DEVICE_CODE,
    HEAVY,
    LAYER_0,
    PACKAGE,
    PRIVATE_ACCESS,
    ROOT,
    TOP,
    Module,
    Rule,
    code_lines,
    device_uses,
    import_violations,
    imports,
    modules,
    private_uses,
    rule_of,
    within,
)

MAX_FUNCTION_LINES = 60
LONG_FUNCTIONS: dict[str, str] = {}  # "module:function" -> the reason why it may be long


def test_every_module_has_a_rule() -> None:
    packages = {module.name for module in modules() if module.path.name == "__init__.py"}
    without = [m.name for m in modules() if rule_of(m) is None and m.name not in packages]
    assert not without, "add them to RULES"


def test_imports_follow_the_layers() -> None:
    found: list[str] = []
    for module in modules():
        rule = rule_of(module) or Rule((module.name,), ())
        found += import_violations(module, rule)
    assert not found, "\n" + "\n".join(found)


def test_nothing_imports_the_top() -> None:
    """Entries and drivers may change without anybody below noticing."""
    found = [
        module.at(node, f"{module.name} imports {imported}")
        for module in modules()
        if not within(module.name, TOP)
        for node, imported in imports(module)
        if within(imported, tuple(f"mindspeed_rl.{name}" for name in TOP))
    ]
    assert not found, "\n" + "\n".join(found)


def test_devices_are_named_in_platforms_only() -> None:
    found = [
        use for module in modules() if not within(module.name, DEVICE_CODE)
        for use in device_uses(module)
    ]  # fmt: skip
    assert not found, "\n" + "\n".join(found)


def test_private_names_of_libraries_are_fenced() -> None:
    """They break with every release, so each lives where the version is checked."""
    found = [
        use for module in modules() if not within(module.name, PRIVATE_ACCESS)
        for use in private_uses(module)
    ]  # fmt: skip
    assert not found, "\n" + "\n".join(found)


def test_functions_are_short() -> None:
    found = [
        module.at(node, f"{node.name} has {num} lines of code, allowed are {MAX_FUNCTION_LINES}")
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
        and f"{module.name}:{node.name}" not in LONG_FUNCTIONS
        and (num := code_lines(module, node)) > MAX_FUNCTION_LINES
    ]
    assert not found, "\n" + "\n".join(found)


BLOCKED_IMPORT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(f"{{name}} is blocked in layer 0")

sys.meta_path.insert(0, Blocker())
for name in {names}:
    __import__(name)
"""


def test_layer_0_imports_without_heavy_libraries() -> None:
    """A dry run and an error message about a flag need none of them."""
    names = [f"mindspeed_rl.{m.name}" for m in modules() if within(m.name, LAYER_0)]
    assert len(names) > 20
    blocked = sorted(HEAVY | {"numpy", "transformers", "datasets", "torch_npu", "matplotlib"})
    script = BLOCKED_IMPORT.format(blocked=blocked, names=names)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# --- the rules above must be able to fail ------------------------------------------------------


def violations_of(name: str, text: str) -> list[str]:
    module = Module(name, PACKAGE / "made_up.py", text, ast.parse(text))
    rule = rule_of(module)
    assert rule is not None
    found = list(import_violations(module, rule))
    if not within(name, DEVICE_CODE):
        found += device_uses(module)
    if not within(name, PRIVATE_ACCESS):
        found += private_uses(module)
    return found


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.rl", "import torch", "config.rl imports torch; allowed of these: none"),
        ("models.spec", "def f():\n    import torch.nn", "made_up.py:2: models.spec imports torch"),
        ("rewards.pool", "import torch.distributed as dist", "imports torch.distributed"),
        ("rewards.pool", "from torch import distributed", "imports torch.distributed"),
        ("resharding.executor", "from vllm import LLM", "imports vllm"),
        ("trainer.model", "import vllm", "imports vllm"),
        ("trainer.model", "from mindspeed_rl.rollout import engine", "imports rollout.engine"),
        ("rollout.vllm_engine", "from megatron import core", "imports megatron"),
        ("rollout.vllm_engine", "from mindspeed_rl.trainer.model import X", "not below it"),
        ("train_rl", "import megatron.core", "imports megatron"),
        ("data.rows", "from mindspeed_rl import phases", "imports phases, which is not below"),
        ("observability.jsonl", "from mindspeed_rl.observability.metrics import Mean", "not below"),
        ("trainer.model", "x.cuda()", "`x.cuda`: devices are reached through a Platform"),
        ("orchestration.rl_step", "torch.npu.synchronize()", "`torch.npu`: devices"),
        ("trainer.model", "parser._actions", "`parser._actions` is private to its library"),
        ("trainer.model", "import vllm._C", "`vllm._C` is private to its library"),
    ],
)
def test_violations_are_found(name: str, text: str, message: str) -> None:
    assert any(message in violation for violation in violations_of(name, text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.rl", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("models.spec", "from mindspeed_rl.resharding.boxes import Box"),
        ("data.packing", "import torch"),
        ("trainer.model", "class A:\n    def f(self, other):\n        self._x = other._x"),
        ("rollout.patches.plain_linear", "ops._supports_onednn = False"),
        ("platforms.npu", "torch.npu.synchronize()"),
        ("launch.watchdog", "import os\nos._exit(1)"),
    ],
)
def test_allowed_code_is_not_reported(name: str, text: str) -> None:
    assert violations_of(name, text) == []


def test_code_lines_leave_text_out() -> None:
    text = (
        'def f():\n    """Doc.\n\n    More."""\n\n    # why\n    x = """a\n    b"""\n    return x\n'
    )
    tree = ast.parse(text)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert code_lines(Module("m", PACKAGE, text, tree), function) == 4
