"""What our code uses of other packages, by AST: names, attributes, arguments, patch targets."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TOPS = ("vllm", "vllm_ascend", "torch_npu", "megatron", "mindspeed")
VLLM_CPU, VLLM_NPU = "vllm 0.32.0", "vllm 0.23.0"
_PINS = {
    "vllm_ascend": ("vllm-ascend 0.23.0",),
    "torch_npu": ("torch_npu 2.10.0.post4",),
    "megatron": ("megatron-core 0.16.1",),
    "mindspeed": ("mindspeed core_r0.16.0",),
}
# Which vLLM a file of ours runs on, by prefix; the first that fits. Others run on both.
_VLLM_OF = (
    ("engines/vllm_ascend/", (VLLM_NPU,)),
    ("vllm_patches/step_sync.py", (VLLM_CPU, VLLM_NPU)),
    ("vllm_patches/", (VLLM_CPU,)),
    ("engines/vllm/host_backend.py", (VLLM_CPU,)),
    # the wheels for CUDA and CPU have these sources in common: support/cuda_wheel.py; the release
    # for torch 2.11 is that beneath vllm-ascend
    ("engines/vllm/cuda_backend.py", (VLLM_CPU, VLLM_NPU)),
    ("platforms/npu", (VLLM_NPU,)),
    ("", (VLLM_CPU, VLLM_NPU)),
)


# What arrives as an argument, where nothing in the file says from where: our name -> what it is.
_ARRIVES = {
    "platforms/accelerator.py": {"self._api": ("torch_npu", "npu")},
    "platforms/pool_memory.py": {
        "self._camem": ("vllm_ascend.device_allocator.camem", ""),
        "self._wake": ("vllm_ascend.worker.worker", "NPUWorker.wake_up"),
    },
    # vLLM-Ascend's runner has both attributes from vLLM's, as the CPU's has
    "engines/vllm/engine_memory.py": {
        "runner": ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
        "compilation": ("vllm.config", "CompilationConfig"),
    },
}

_PYTHONS_OWN = ("__path__", "__file__", "__module__", "__base__")  # attributes that no source has


@dataclass(frozen=True, slots=True)
class Use:
    """One place in our code.

    Attributes:
        where: file and line.
        module: the module of the other package, as far as the import says.
        path: names below it, dotted; empty for the module itself.
        call: whether it is called.
        positional: arguments by position; -1 where they are unpacked.
        keywords: names of arguments; ``**`` among them where they are unpacked.
        exact: the parameters that a patch was written for; ``None`` for other uses.
        packages: where it has to hold.
    """

    where: str
    module: str
    path: str
    packages: tuple[str, ...]
    call: bool = False
    positional: int = 0
    keywords: tuple[str, ...] = ()
    exact: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        """Its name in an interface."""
        return f"{self.module}:{self.path}" if self.path else self.module


def uses_of(package: Path) -> Iterator[Use]:
    """All uses in a package of ours."""
    for file in sorted(package.rglob("*.py")):
        name, text = file.relative_to(package).as_posix(), file.read_text()
        if name in _ARRIVES or any(top in text for top in TOPS):
            yield from _File(name, ast.parse(text)).uses()


def packages_of(file: str, module: str) -> tuple[str, ...]:
    """Where a use in a file of ours has to hold."""
    top = module.partition(".")[0]
    if top in _PINS:
        return _PINS[top]
    return next(packages for prefix, packages in _VLLM_OF if file.startswith(prefix))


class _File:
    """One file of ours: what its names stand for, and where they are used."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self._name, self._tree = name, tree
        # our name, or self.attribute -> module and path
        self._stands_for: dict[str, tuple[str, str]] = dict(_ARRIVES.get(name, {}))

    def uses(self) -> Iterator[Use]:
        for node in ast.walk(self._tree):
            yield from self._imports(node)
        for node in ast.walk(self._tree):
            yield from self._by_name(node)
        for node in ast.walk(self._tree):
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                self._assignment(node)
        inner = {id(node.value) for node in ast.walk(self._tree) if isinstance(node, ast.Attribute)}
        called = {id(n.func): n for n in ast.walk(self._tree) if isinstance(n, ast.Call)}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Patch":
                yield from self._patch(node)
            elif isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in inner:
                yield from self._chain(node, called.get(id(node)))

    def _at(self, node: ast.AST, module: str, path: str, **more: object) -> Use:
        where = f"{self._name}:{getattr(node, 'lineno', 0)}"
        packages = packages_of(self._name, module)
        return Use(where, module, path, packages, **more)  # type: ignore[arg-type]

    def _imports(self, node: ast.AST) -> Iterator[Use]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in TOPS:
                    bound = alias.asname or alias.name.partition(".")[0]
                    self._stands_for[bound] = (alias.name if alias.asname else bound, "")
                    yield self._at(node, alias.name, "")
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            for alias in node.names if module.partition(".")[0] in TOPS else []:
                self._stands_for[alias.asname or alias.name] = (module, alias.name)
                yield self._at(node, module, alias.name)

    def _by_name(self, node: ast.AST) -> Iterator[Use]:
        """``import_module("vllm.config")``."""
        if not isinstance(node, ast.Call) or len(node.args) != 1:
            return
        loader = ast.unparse(node.func).rpartition(".")[2]
        argument = node.args[0]
        if (
            loader == "import_module"
            and isinstance(argument, ast.Constant)
            and str(argument.value).partition(".")[0] in TOPS
        ):
            self._stands_for[ast.unparse(node)] = (str(argument.value), "")
            yield self._at(node, str(argument.value), "")

    def _assignment(self, node: ast.Assign | ast.AnnAssign) -> None:
        """``self._npu = torch_npu.npu``: the attribute stands for it from now on."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is None:
            return
        text = ast.unparse(targets[0])
        found = self._resolve(node.value)
        by_name = isinstance(node.value, ast.Call)
        if found and (text.startswith("self.") or by_name):
            self._stands_for[text] = found

    def _resolve(self, node: ast.AST) -> tuple[str, str] | None:
        """What a name, an attribute of one, or an import by name stands for."""
        below: list[str] = []
        at = node
        while True:
            if found := self._stands_for.get(ast.unparse(at)):
                return found[0], ".".join([*([found[1]] if found[1] else []), *below])
            if not isinstance(at, ast.Attribute):
                return None
            below.insert(0, at.attr)
            at = at.value

    def _chain(self, node: ast.Name | ast.Attribute, call: ast.Call | None) -> Iterator[Use]:
        found = self._resolve(node)
        if found is None or not found[1] or found[1].endswith(_PYTHONS_OWN):
            return
        if call is None:
            yield self._at(node, *found)
            return
        unpacked = any(isinstance(a, ast.Starred) for a in call.args)
        keywords = tuple(k.arg or "**" for k in call.keywords)
        positional = -1 if unpacked else len(call.args)
        yield self._at(node, *found, call=True, positional=positional, keywords=keywords)

    def _patch(self, node: ast.Call) -> Iterator[Use]:
        given = {k.arg: k.value for k in node.keywords}
        target, written_for = given.get("target"), given.get("parameters")
        if target is None or written_for is None:
            return
        try:
            module, _, path = str(ast.literal_eval(target)).partition(":")
            exact = tuple(ast.literal_eval(written_for))
        except ValueError:  # a target that is put together
            return
        if module.partition(".")[0] in TOPS:
            yield self._at(node, module, path, exact=exact)


def problems(uses: Iterable[Use], packages: Mapping[str, Mapping[str, str | None]]) -> list[str]:
    """What is not in the interfaces of the packages given, or has other parameters there."""
    return [
        f"{use.where}: {package}: {problem}"
        for use in uses
        for package in use.packages
        if package in packages and (problem := _problem(use, packages[package]))
    ]


def _problem(use: Use, interface: Mapping[str, str | None]) -> str:
    if use.key not in interface:
        return f"{use.key} is not there"
    parameters = interface[use.key]
    signature = None if parameters is None else signature_of(parameters)
    if use.exact is not None:
        found = tuple(signature.parameters) if signature else None
        return "" if found == use.exact else f"{use.key} takes {found}, patched for {use.exact}"
    if signature is None or not use.call:
        return ""
    unpacked = use.positional < 0 or "**" in use.keywords
    bind = signature.bind_partial if unpacked else signature.bind
    bound = [None] * (next(iter(signature.parameters), "") in ("self", "cls"))
    try:
        bind(*bound, *[None] * use.positional, **dict.fromkeys({*use.keywords} - {"**"}))
    except TypeError as error:
        return f"{use.key}({parameters}): {error}"
    return ""


def signature_of(parameters: str) -> inspect.Signature:
    """The signature of a kept parameter list; which defaults there are does not matter."""
    tree = ast.parse(f"lambda {parameters}: None", mode="eval")
    assert isinstance(tree.body, ast.Lambda)
    for defaults in (tree.body.args.defaults, tree.body.args.kw_defaults):
        defaults[:] = [default and ast.copy_location(ast.Constant(None), default)
                       for default in defaults]  # fmt: skip
    return inspect.signature(eval(compile(tree, "parameters", "eval")))
