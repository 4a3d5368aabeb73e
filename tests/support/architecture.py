"""Who may import what in mindspeed_rl, and the walkers that find what breaks it.

:data:`ROOMS` is the architecture; ``tests/test_import_rules.py`` applies it.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "mindspeed_rl"
HEAVY = frozenset({"torch", "megatron", "mindspeed", "vllm"})


@dataclass(frozen=True)
class Room:
    """What the modules of a room may import.

    Attributes:
        rooms: other rooms; each stands earlier in the table.
        heavy: which of torch, torch.distributed, megatron, mindspeed, vllm.
    """

    rooms: tuple[str, ...] = ()
    heavy: frozenset[str] = frozenset()


TORCH = frozenset({"torch"})
TORCH_DISTRIBUTED = TORCH | {"torch.distributed"}
MEGATRON = TORCH_DISTRIBUTED | {"megatron", "mindspeed"}

# From the bottom to the top. A room imports only rooms above it in this table.
ROOMS: Mapping[str, Room] = {
    "core": Room(),
    "compat": Room(("core",)),
    "models": Room(("core",)),
    "algorithms": Room(("core",), TORCH),
    "config": Room(("core", "compat", "models", "algorithms")),
    "flag_checks": Room(("core", "algorithms", "config")),
    "command_line": Room(("core", "compat", "algorithms", "config", "flag_checks")),
    "parallel": Room(("core",), TORCH_DISTRIBUTED),
    "platforms": Room(("core", "config"), TORCH_DISTRIBUTED),
    "metrics": Room(("core", "config", "parallel", "platforms"), TORCH_DISTRIBUTED),
    "proof": Room(("core",), TORCH),
    "weight_layouts": Room(("core", "models")),
    "weights": Room(
        ("core", "models", "parallel", "metrics", "proof", "weight_layouts"), TORCH_DISTRIBUTED
    ),
    "deltas": Room(("core", "metrics", "weights"), TORCH),
    "expert_placement": Room(("core", "models", "weight_layouts")),
    "rollout": Room(
        (
            *("core", "config", "models", "parallel", "platforms"),
            *("metrics", "weight_layouts", "weights"),
        ),
        TORCH_DISTRIBUTED,
    ),
    "vllm_patches": Room(
        ("core", "algorithms", "parallel", "rollout"), TORCH_DISTRIBUTED | {"vllm"}
    ),
    "engines": Room(
        (
            *("core", "compat", "config", "models", "parallel", "platforms"),
            *("metrics", "weight_layouts", "expert_placement", "rollout", "vllm_patches"),
        ),
        TORCH_DISTRIBUTED | {"vllm"},
    ),
    "checkpoint": Room(
        ("core", "config", "models", "parallel", "weight_layouts"), TORCH_DISTRIBUTED
    ),
    "adapters": Room(
        ("core", "algorithms", "config", "parallel", "weight_layouts", "weights", "checkpoint"),
        MEGATRON,
    ),
    "handover": Room(("core", "algorithms", "config", "weight_layouts", "weights", "adapters")),
    "packing": Room(("core", "config", "models")),
    "planning": Room(
        (
            *("core", "algorithms", "config", "flag_checks", "models", "rollout", "engines"),
            *("weight_layouts", "weights", "adapters", "expert_placement", "handover", "packing"),
        )
    ),
    "samples": Room(("core", "metrics", "parallel", "packing"), TORCH_DISTRIBUTED),
    "attention": Room(("core", "models", "samples"), TORCH_DISTRIBUTED),
    "data": Room(("core",), TORCH),
    "rewards": Room(("core", "config", "data"), TORCH),
    "environments": Room(("core", "config", "rewards"), TORCH),
    "endpoint": Room(("core", "rewards", "environments"), TORCH),
    "colocation": Room(("core", "metrics", "platforms", "rollout"), TORCH),
    "convert": Room(
        ("core", "compat", "config", "command_line", "models", "weight_layouts", "checkpoint"),
        TORCH_DISTRIBUTED,
    ),
    "model_files": Room(
        (
            *("core", "config", "models", "parallel", "proof", "weight_layouts"),
            *("weights", "checkpoint", "convert"),
        ),
        TORCH_DISTRIBUTED,
    ),
    "trainer": Room(
        (
            *("core", "config", "models", "parallel", "platforms", "metrics", "weight_layouts"),
            *("algorithms", "samples", "attention", "data", "colocation", "checkpoint"),
            *("adapters", "convert"),
        ),
        MEGATRON,
    ),
    "trainer_state": Room(
        (
            *("core", "config", "parallel", "platforms", "weight_layouts", "checkpoint"),
            *("adapters", "convert", "trainer"),
        ),
        MEGATRON,
    ),
    "diagnosis": Room(("core", "platforms")),
    "elastic": Room(("core", "planning")),
    "launch": Room(
        (
            *("core", "compat", "config", "command_line", "models", "platforms", "engines"),
            *("flag_checks", "planning", "rewards", "diagnosis", "elastic", "checkpoint"),
        ),
        TORCH_DISTRIBUTED,
    ),
    "peers": Room(
        (
            *("core", "config", "checkpoint", "parallel", "metrics", "planning", "trainer"),
            *("trainer_state", "launch"),
        ),
        TORCH_DISTRIBUTED,
    ),
    "generation": Room(
        (
            *("core", "config", "algorithms", "parallel", "metrics", "rollout", "planning"),
            *("samples", "data", "rewards", "environments", "endpoint", "colocation"),
        ),
        TORCH_DISTRIBUTED,
    ),
    "distillation": Room(
        ("core", "config", "algorithms", "parallel", "data", "samples", "trainer"),
        TORCH_DISTRIBUTED,
    ),
    "building": Room(
        (
            *("core", "config", "models", "parallel", "platforms", "algorithms", "data"),
            *("weight_layouts", "weights", "deltas", "rollout", "engines", "planning", "samples"),
            *("colocation", "checkpoint", "adapters", "model_files", "trainer", "launch"),
            "distillation",
        ),
        TORCH_DISTRIBUTED,
    ),
    "rl": Room(
        (
            *("core", "config", "models", "parallel", "platforms"),
            *("metrics", "weight_layouts", "weights"),
            *("rollout", "engines", "planning", "algorithms", "samples", "data", "rewards"),
            *("environments", "colocation", "checkpoint", "trainer", "launch", "generation"),
            *("trainer_state", "adapters", "peers", "distillation", "expert_placement"),
            *("flag_checks", "model_files", "building"),
        ),
        TORCH_DISTRIBUTED,
    ),
    "replay": Room(
        (
            *("core", "config", "command_line", "parallel", "metrics"),
            *("weight_layouts", "planning"),
            *("samples", "checkpoint", "trainer", "launch", "building", "rl"),
        ),
        TORCH_DISTRIBUTED,
    ),
    "selftest": Room(
        (
            *("core", "config", "models", "metrics", "weight_layouts"),
            *("weights", "planning", "algorithms"),
            *("samples", "trainer", "launch", "building", "rl"),
        ),
        TORCH_DISTRIBUTED,
    ),
}
# Entries: nothing imports them, and they import torch inside functions only.
ENTRIES = ("train_rl", "pretrain", "score", "doctor", "cli", "api")
ENTRY = Room(tuple(ROOMS), TORCH_DISTRIBUTED)

# Modules that a dry run and an error about a flag go through: neither torch nor numpy.
LIGHT = (
    "core",
    "compat",
    "models",
    "config",
    "flag_checks",
    "command_line",
    *(
        f"algorithms.{name}"
        for name in (
            *("advantages", "aggregation", "bounds", "catalogue", "distillation", "kl"),
            *("lora", "policy_losses"),
        )
    ),
    "algorithms.types",
    "adapters.plan",
    "packing",
    *(f"handover.{name}" for name in ("buffers", "hiding", "joint", "offload")),
    *(f"planning.{name}" for name in ("activations", "budget", "communicators", "prediction")),
    "planning.step_time",
    *(
        f"planning.{name}"
        for name in ("expert_dispatch", "hccl_buffers", "phase_limits", "run_plan")
    ),
    "weight_layouts",
    "rollout.provider",
    "rollout.rebalance_plan",
    "engines.registry",
    *(f"engines.vllm.{name}" for name in ("capabilities", "layout", "options", "provider")),
    "engines.vllm.arguments",
    "engines.vllm.tuning",
    "engines.vllm_ascend.arguments",
    "platforms.allocator_settings",
    "launch.failures",
    "metrics.jsonl",
    "metrics.names",
)

DEVICE_CODE = ("platforms",)
# Names that a library keeps to itself break with every release: each lives where it is checked.
PRIVATE_ACCESS = (
    "convert.torch_files",  # tensors without data, and their places in a file
    "convert.torch_dist",  # entries of a distributed checkpoint's index
    "engines.vllm",
    "engines.vllm_ascend",
    "vllm_patches",
    "attention.varlen",  # the operator that autograd of varlen_attn calls
    "trainer.patches",
    "trainer_state.patches",
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


def imports(module: Module, *, types: bool = False) -> Iterator[tuple[ast.AST, str]]:
    """Every imported module or name, dotted, executed imports inside functions included.

    Those for types alone are counted with ``types``.
    """
    skipped = set() if types else type_checking_only(module.tree)
    for node in ast.walk(module.tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}"


def room_of(module: Module) -> Room:
    """What a module may import; the package itself imports nothing.

    Raises:
        KeyError: a room that is not in :data:`ROOMS`.
    """
    name = module.name.partition(".")[0]
    if not name:
        return Room()
    return ENTRY if name in ENTRIES else ROOMS[name]


def heavy_name(imported: str) -> str | None:
    """The entry of a rule's ``heavy`` that an import needs."""
    top = imported.split(".")[0]
    if within(imported, ("torch.distributed",)):
        return "torch.distributed"
    return top if top in HEAVY else None


def import_violations(module: Module) -> Iterator[str]:
    """Imports that the room of the module does not have in its table."""
    room, home = room_of(module), module.name.partition(".")[0]
    for node, imported in imports(module):
        heavy = heavy_name(imported)
        if heavy and heavy not in room.heavy:
            allowed = ", ".join(sorted(room.heavy)) or "none"
            yield module.at(node, f"{module.name} imports {heavy}; allowed of these: {allowed}")
        if within(imported, ("mindspeed_rl",)):
            other = imported.split(".")[1]
            if other != home and other not in room.rooms:
                yield module.at(node, f"{module.name} imports {other}, which is not below it")


def import_graph(*, types: bool = False) -> dict[str, set[str]]:
    """The modules of ours that each module imports, wherever in it; see :func:`imports`."""
    names = {module.name for module in modules()}
    graph: dict[str, set[str]] = {}
    for module in modules():
        found = set()
        for _, imported in imports(module, types=types):
            ours = imported.removeprefix("mindspeed_rl.")
            if ours != imported:
                found.add(ours if ours in names else ours.rpartition(".")[0])
        graph[module.name] = found - {module.name}
    return graph


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules each of which imports the one before it, the first one the last; none: empty."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def device_uses(module: Module) -> Iterator[str]:
    """``torch.cuda``, ``torch.npu``, ``x.cuda(...)`` and ``x.npu(...)``, but not operators."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Attribute) or node.attr not in ("cuda", "npu"):
            continue
        if ast.unparse(node.value) == "torch.ops":
            continue
        yield module.at(node, f"`{ast.unparse(node)}`: devices are reached through a Platform")


def private_uses(module: Module) -> Iterator[str]:
    """``x._name`` where neither ``x`` is self, cls or super() nor the name defined in this file.

    An approximation: what this file names itself (functions, classes, attributes of self, slots)
    is its own, whatever object it is read from.
    """
    own = set()
    for node in ast.walk(module.tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                own.add(name)
            case ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                own.add(name)
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
