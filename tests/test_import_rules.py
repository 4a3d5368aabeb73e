"""The architecture as a test: who may import what, read from the syntax tree of every module.

Data flows one way and heavy libraries have one home each. A failure names file, line and rule.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mindspeed_rl"
HEAVY = frozenset({"torch", "megatron", "mindspeed", "vllm"})

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Rule:
    """What the modules of some packages may import.

    Attributes:
        modules: dotted prefixes within mindspeed_rl.
        ours: prefixes within mindspeed_rl that they may import, besides their own.
        heavy: which of torch, torch.distributed, megatron, mindspeed, vllm they may import.
    """

    modules: tuple[str, ...]
    ours: tuple[str, ...]
    heavy: frozenset[str] = frozenset()


LAYER_0 = (
    "types",
    "config",
    "compat",
    "arguments",
    "patching",
    "versions",
    "models",
    "parallel.layout",
    "resharding.boxes",
    "resharding.layouts",
    "resharding.planner",
    "resharding.schedule",
    "rollout.vllm_versions",
)
# Files and text only, so that rewards and data may write logs without torch.
PLAIN_OBSERVABILITY = tuple(
    f"observability.{name}" for name in ("files", "jsonl", "names", "summary", "host_memory")
)
LAYER_1 = ("data", "rewards", "algorithms")
LAYER_2 = (
    "checkpoint",
    "platforms",
    "parallel",
    "resharding",
    "experience",
    "observability",
)
ENGINE_SIDE = ("rollout.engine", "rollout.process_state")
TORCH = frozenset({"torch"})
TORCH_DISTRIBUTED = TORCH | {"torch.distributed"}

# The first rule whose prefix fits applies, so exceptions come before their package.
RULES = (
    Rule(LAYER_0, LAYER_0),
    Rule(PLAIN_OBSERVABILITY, PLAIN_OBSERVABILITY),
    Rule(LAYER_1, (*LAYER_0, *LAYER_1, *PLAIN_OBSERVABILITY), TORCH),
    Rule(
        ("platforms.cpu_install", "platforms.npu_install", "bootstrap"),
        (*LAYER_0, *LAYER_1, *LAYER_2),
        TORCH_DISTRIBUTED | {"megatron", "mindspeed"},
    ),
    Rule(ENGINE_SIDE, (*LAYER_0, *LAYER_1, "platforms"), TORCH),
    Rule(LAYER_2, (*LAYER_0, *LAYER_1, *LAYER_2), TORCH_DISTRIBUTED),
    Rule(
        ("rollout",),
        (*LAYER_0, *LAYER_1, *LAYER_2, "rollout"),
        TORCH_DISTRIBUTED | {"vllm"},
    ),
    Rule(
        ("trainer",),
        (*LAYER_0, *LAYER_1, *LAYER_2),
        TORCH_DISTRIBUTED | {"megatron", "mindspeed"},
    ),
    Rule(("phases",), (*LAYER_0, *LAYER_2, "rollout.engine"), TORCH),
    Rule(
        ("orchestration", "train_rl", "pretrain", "score", "doctor"),
        ("",),
        TORCH_DISTRIBUTED,
    ),
)
# Entries and drivers are at the top: nothing below imports them.
TOP = ("orchestration", "train_rl", "pretrain", "score", "doctor", "phases")

DEVICE_CODE = ("platforms",)
PRIVATE_ACCESS = ("rollout.vllm_engine", "rollout.patches", "trainer.patches", "platforms")
LONG_FUNCTIONS: dict[str, str] = {}  # "module:function" -> the reason why it may be long


@dataclass(frozen=True)
class Module:
    """One parsed file."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    def at(self, node: ast.AST, message: str) -> str:
        """A violation as an editor understands it."""
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {message}"


@cache
def modules() -> tuple[Module, ...]:
    """All modules of the package; a package is named after its folder."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        found.append(Module(name, path, text, ast.parse(text)))
    return tuple(found)


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(prefix == "" or name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def type_checking_only(tree: ast.Module) -> set[ast.AST]:
    """Nodes under ``if TYPE_CHECKING``: they are never executed."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }


def imports(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Every imported module or name, dotted, executed imports inside functions included."""
    skipped = type_checking_only(module.tree)
    for node in ast.walk(module.tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}"


def rule_of(module: Module) -> Rule | None:
    return next((rule for rule in RULES if within(module.name, rule.modules)), None)


def heavy_name(imported: str) -> str | None:
    """The entry of a rule's ``heavy`` that an import needs."""
    top = imported.split(".")[0]
    if within(imported, ("torch.distributed",)):
        return "torch.distributed"
    return top if top in HEAVY else None


def import_violations(module: Module, rule: Rule) -> Iterator[str]:
    for node, imported in imports(module):
        heavy = heavy_name(imported)
        if heavy and heavy not in rule.heavy:
            allowed = ", ".join(sorted(rule.heavy)) or "none"
            yield module.at(node, f"{module.name} imports {heavy}; allowed of these: {allowed}")
        if not within(imported, ("mindspeed_rl",)):
            continue
        ours = imported.removeprefix("mindspeed_rl").removeprefix(".")
        own = within(ours, rule.modules) and not within(ours, TOP)
        if not own and not within(ours, rule.ours):
            yield module.at(node, f"{module.name} imports {ours}, which is not below it")


def test_every_module_has_a_rule() -> None:
    packages = {module.name for module in modules() if module.path.name == "__init__.py"}
    without = [m.name for m in modules() if rule_of(m) is None and m.name not in packages]
    assert not without, "add them to RULES"


def test_imports_follow_the_layers() -> None:
    found = []
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


def device_uses(module: Module) -> Iterator[str]:
    """``torch.cuda``, ``torch.npu``, ``x.cuda(...)`` and ``x.npu(...)``."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Attribute) or node.attr not in ("cuda", "npu"):
            continue
        yield module.at(node, f"`{ast.unparse(node)}`: devices are reached through a Platform")


def test_devices_are_named_in_platforms_only() -> None:
    found = [
        use for module in modules() if not within(module.name, DEVICE_CODE)
        for use in device_uses(module)
    ]  # fmt: skip
    assert not found, "\n" + "\n".join(found)


def private_uses(module: Module) -> Iterator[str]:
    """``x._name`` where neither ``x`` is self, cls or super() nor the name defined in this file.

    An approximation: what this file names itself (functions, classes, attributes of self, slots)
    is its own, whatever object it is read from.
    """
    own = {
        node.name
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    own |= {
        node.attr
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    own |= {node.target.id for node in ast.walk(module.tree) if _is_field(node)}
    documented = {("os", "_exit")}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Attribute) or not _is_private(node.attr):
            continue
        owner = ast.unparse(node.value)
        if owner in ("self", "cls", "super()") or (owner, node.attr) in documented:
            continue
        if node.attr not in own:
            yield module.at(node, f"`{ast.unparse(node)}` is private to its library")
    for node, imported in imports(module):
        if not within(imported, ("mindspeed_rl",)) and any(map(_is_private, imported.split("."))):
            yield module.at(node, f"`{imported}` is private to its library")


def _is_field(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def test_private_names_of_libraries_are_fenced() -> None:
    """They break with every release, so each lives where the version is checked (R54)."""
    found = [
        use for module in modules() if not within(module.name, PRIVATE_ACCESS)
        for use in private_uses(module)
    ]  # fmt: skip
    assert not found, "\n" + "\n".join(found)


def test_modules_are_short() -> None:
    lengths = {str(m.path.relative_to(ROOT)): len(m.text.splitlines()) for m in modules()}
    long = {path: num for path, num in lengths.items() if num > MAX_MODULE_LINES}
    assert not long


def code_lines(module: Module, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines with code: no blank lines, comments or docstrings."""
    first, last = function.lineno, function.end_lineno or function.lineno
    docstrings = set()
    for node in ast.walk(function):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in silent and first <= token.start[0] <= last:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


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
import sys, time

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(f"{{name}} is blocked in layer 0")

sys.meta_path.insert(0, Blocker())
start = time.perf_counter()
for name in {names}:
    __import__(name)
print(time.perf_counter() - start)
"""


def test_layer_0_imports_without_heavy_libraries_and_quickly() -> None:
    """A dry run and an error message about a flag need none of them, and no patience."""
    names = [f"mindspeed_rl.{m.name}" for m in modules() if within(m.name, LAYER_0)]
    assert len(names) > 20
    blocked = sorted(HEAVY | {"numpy", "transformers", "datasets", "torch_npu", "matplotlib"})
    script = BLOCKED_IMPORT.format(blocked=blocked, names=names)
    times = []
    for _ in range(3):  # the machine may be busy; the import itself does not get slower
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        times.append(float(done.stdout))
    assert min(times) < 0.5


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
        ("orchestration.watchdog", "import os\nos._exit(1)"),
    ],
)
def test_allowed_code_is_not_reported(name: str, text: str) -> None:
    assert violations_of(name, text) == []


def test_code_lines_leave_text_out() -> None:
    text = 'def f():\n    """Doc.\n\n    More."""\n\n    # comment\n    x = """a\n    b"""\n    return x\n'
    tree = ast.parse(text)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert code_lines(Module("m", PACKAGE, text, tree), function) == 4
