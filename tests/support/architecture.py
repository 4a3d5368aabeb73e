"""Who may import what in mindspeed_rl, and the walkers that find what breaks it.

The rules are the table of the architecture; ``tests/test_import_rules.py`` applies them.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "mindspeed_rl"
HEAVY = frozenset({"torch", "megatron", "mindspeed", "vllm"})


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
    "errors",
    "config",
    "compat",
    "arguments",
    "patching",
    "versions",
    "memory",
    "models",
    "parallel.layout",
    "parallel.stages",
    "resharding.boxes",
    "resharding.garbage",
    "resharding.layouts",
    "rollout.capabilities",
    "rollout.expert_map",
    "rollout.graph_sizes",
    "rollout.rebalance_plan",
    "platforms.allocator_settings",
    "platforms.installed",
)
# Plans of reshards: arithmetic with numpy.
PLANNING = tuple(f"resharding.{name}" for name in ("planner", "schedule", "sources", "traffic"))
# Files and text only, so that rewards and data may write logs without torch.
PLAIN_OBSERVABILITY = tuple(
    f"observability.{name}" for name in ("files", "jsonl", "names", "summary")
)
LAYER_1 = ("data", "rewards", "environments", "algorithms")
LAYER_2 = (
    "checkpoint",
    "conversion",
    "platforms",
    "parallel",
    "resharding",
    "experience",
    "observability",
    "offload",
)
ENGINE_SIDE = ("rollout.engine", "rollout.process_state")
TORCH = frozenset({"torch"})
TORCH_DISTRIBUTED = TORCH | {"torch.distributed"}

# The first rule whose prefix fits applies, so exceptions come before their package.
RULES = (
    Rule(LAYER_0, LAYER_0),
    Rule(PLANNING, (*LAYER_0, *PLANNING)),
    Rule(("dryrun",), (*LAYER_0, *PLANNING, "dryrun")),
    Rule(("diagnosis",), (*LAYER_0, "diagnosis")),
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
    Rule(("phases",), (*LAYER_0, *LAYER_2, "rollout.engine", "phases"), TORCH),
    Rule(
        ("launch.failures",),  # a user's mistake is told before torch is imported
        (*LAYER_0, "launch.failures"),
    ),
    Rule(
        ("launch",),
        (*LAYER_0, *LAYER_2, "bootstrap", "rewards", "dryrun", "diagnosis", "launch"),
        TORCH_DISTRIBUTED,
    ),
    Rule(
        ("orchestration", "train_rl", "pretrain", "score", "doctor"),
        ("",),
        TORCH_DISTRIBUTED,
    ),
)
# Entries and drivers are at the top: nothing below imports them.
TOP = ("launch", "orchestration", "train_rl", "pretrain", "score", "doctor", "phases")

DEVICE_CODE = ("platforms",)
PRIVATE_ACCESS = (
    "conversion.torch_files",  # nor for tensors without data and parts of a file
    "conversion.distributed_target",  # nor for the entries of a distributed checkpoint's index
    "rollout.vllm_engine",
    "rollout.ascend",
    "offload.storages",
    "rollout.patches",
    "trainer.patches",
    "platforms",
)


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
    return any(
        prefix == "" or name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes
    )


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


def device_uses(module: Module) -> Iterator[str]:
    """``torch.cuda``, ``torch.npu``, ``x.cuda(...)`` and ``x.npu(...)``."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Attribute) or node.attr not in ("cuda", "npu"):
            continue
        yield module.at(node, f"`{ast.unparse(node)}`: devices are reached through a Platform")


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
    own |= {
        node.target.id
        for node in ast.walk(module.tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
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


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def code_lines(module: Module, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines with code: no blank lines, comments or docstrings."""
    first, last = function.lineno, function.end_lineno or function.lineno
    docstrings: set[int] = set()
    for node in ast.walk(function):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in silent and first <= token.start[0] <= last:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)
