"""The architecture as a test: who may import what, read from the syntax tree of every module.

Imports lead downwards only, between rooms and inside them, and heavy libraries have one home each.
A failure names file, line and rule.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter

import pytest
from support.architecture import (
    DEVICE_CODE,
    ENTRIES,
    HEAVY,
    LIGHT,
    PACKAGE,
    PRIVATE_ACCESS,
    ROOMS,
    ROOT,
    Module,
    circle,
    code_lines,
    device_uses,
    import_graph,
    import_violations,
    modules,
    private_uses,
    within,
)

MAX_FUNCTION_LINES = 60
MAX_ROOM_LINES = 4000
CAMEL_CASE = re.compile(r"_?[A-Z]\w*[a-z]")
LONG_FUNCTIONS: dict[str, str] = {}  # "module:function" -> the reason why it may be long


def test_the_table_of_rooms_is_whole_and_has_no_circle() -> None:
    rooms = {module.name.partition(".")[0] for module in modules()} - {"", *ENTRIES}
    assert rooms == set(ROOMS)
    order = list(ROOMS)
    for name, room in ROOMS.items():
        assert all(order.index(other) < order.index(name) for other in room.rooms), name


def test_imports_follow_the_rooms() -> None:
    found = [violation for module in modules() for violation in import_violations(module)]
    assert not found, "\n" + "\n".join(found)


# Modules of megatron-core that another room names in a string, which is an import all the same.
MEGATRON_BY_NAME = ("trainer", "trainer_state", "platforms.cpu_install", "platforms.npu_install")


def test_megatron_core_is_named_by_the_trainer_and_the_platforms_alone() -> None:
    """So that its next version is a matter of these; ``megatron.core`` itself is looked for."""
    found = [
        module.at(node, f"`{node.value}` is named outside of {', '.join(MEGATRON_BY_NAME)}")
        for module in modules()
        if not within(module.name, MEGATRON_BY_NAME)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"megatron\.core\.[\w.]+(:[\w.]+)?", node.value)
        if node.value != "megatron.core.rerun_state_machine"  # the name of its logger
    ]
    assert not found, "\n" + "\n".join(found)


def test_no_module_imports_itself_through_others() -> None:
    """Inside a room as between rooms: a circle has no place to begin reading."""
    assert circle(import_graph()) == []
    assert circle(import_graph(types=True)) == [], "imports for types count as well"


def test_nothing_imports_an_entry() -> None:
    found = [f"{name} imports {other}" for name, others in import_graph().items()
             for other in others if other in ENTRIES]  # fmt: skip
    assert not found


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


def test_rooms_are_small_enough_to_read() -> None:
    sizes: Counter[str] = Counter()
    for module in modules():
        sizes[module.name.partition(".")[0]] += len(module.text.splitlines())
    assert {room: size for room, size in sizes.items() if size > MAX_ROOM_LINES} == {}


def test_no_two_classes_or_type_aliases_share_a_name() -> None:
    """In product and tools; aliases are assignments of a module to a name in CamelCase."""
    homes: dict[str, list[str]] = {}
    for path in [module.path for module in modules()] + [*(ROOT / "tools").rglob("*.py")]:
        tree = ast.parse(path.read_text())
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
        names += [t.id for t in targets if isinstance(t, ast.Name) and CAMEL_CASE.match(t.id)]
        for name in names:
            homes.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


BLOCKED_IMPORT = """
import sys

sys.modules.update(dict.fromkeys({blocked}))  # None: an import of it fails
for name in {names}:
    __import__(name)
"""


def test_light_modules_import_without_heavy_libraries() -> None:
    """A dry run and an error message about a flag need none of them."""
    names = [f"mindspeed_rl.{m.name}" for m in modules() if within(m.name, LIGHT)]
    assert len(names) > 60
    blocked = sorted(HEAVY | {"numpy", "transformers", "datasets", "torch_npu", "matplotlib"})
    script = BLOCKED_IMPORT.format(blocked=blocked, names=names)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# --- the rules above must be able to fail ------------------------------------------------------


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str](), "e": {"d"}}
    assert {*circle(graph)} == {"a", "b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def violations_of(name: str, text: str) -> list[str]:
    module = Module(name, PACKAGE / "made_up.py", text, ast.parse(text))
    found = list(import_violations(module))
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
        ("trainer.model", "import vllm", "imports vllm"),
        ("engines.vllm.engine", "from megatron import core", "imports megatron"),
        ("engines.vllm.engine", "from mindspeed_rl.trainer.model import X", "not below it"),
        ("train_rl", "import megatron.core", "imports megatron"),
        ("data.rows", "from mindspeed_rl import colocation", "imports colocation, which is not"),
        ("rl.update", "import mindspeed_rl.selftest.loss", "imports selftest, which is not"),
        ("trainer.model", "x.cuda()", "`x.cuda`: devices are reached through a Platform"),
        ("rl.update", "torch.npu.synchronize()", "`torch.npu`: devices"),
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
        ("models.spec", "from mindspeed_rl.core.boxes import Box"),
        ("data.packing", "import torch"),
        ("trainer.model", "class A:\n    def f(self, other):\n        self._x = other._x"),
        ("vllm_patches.plain_linear", "ops._supports_onednn = False"),
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
