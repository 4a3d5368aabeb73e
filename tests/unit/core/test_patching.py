"""The patch registry refuses targets that are not what a patch was written for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from mindspeed_rl.core.patching import Patch, apply_patch

SOURCE = """
def double(x, scale=2):
    return x * scale


class Box:
    def method(self, x):
        return x + 1

    @staticmethod
    def static(x):
        return x + 1
"""


@pytest.fixture
def victim(monkeypatch: pytest.MonkeyPatch, request: Any) -> ModuleType:
    """A module of its own for every test: patches stay applied for the life of a process."""
    module = ModuleType(f"patch_victim_{abs(hash(request.node.name))}")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def plus_hundred(original: Callable[..., int]) -> Callable[..., int]:
    def replacement(*args: Any, **kwargs: Any) -> int:
        return original(*args, **kwargs) + 100

    return replacement


def patch_of(module: ModuleType, path: str, *parameters: str) -> Patch:
    return Patch(
        target=f"{module.__name__}:{path}",
        parameters=parameters,
        make=plus_hundred,
        why="test",
        upstream="nowhere",
        versions="1.2.3",
        remove_when="never",
    )


def test_a_function_is_replaced_once(victim: ModuleType) -> None:
    patch = patch_of(victim, "double", "x", "scale")
    apply_patch(patch)
    apply_patch(patch)
    assert victim.double(4) == 108


def test_methods_stay_methods_and_static_methods_static(victim: ModuleType) -> None:
    apply_patch(patch_of(victim, "Box.method", "self", "x"))
    apply_patch(patch_of(victim, "Box.static", "x"))
    assert victim.Box().method(1) == 102
    assert victim.Box().static(1) == victim.Box.static(1) == 102


def test_an_inherited_method_is_replaced_for_the_class_alone(victim: ModuleType) -> None:
    vars(victim)["Inner"] = type("Inner", (victim.Box,), {})
    apply_patch(patch_of(victim, "Inner.method", "self", "x"))
    apply_patch(patch_of(victim, "Inner.static", "x"))
    inner: Any = victim.Inner
    assert inner().method(1) == inner.static(1) == 102
    assert victim.Box().method(1) == victim.Box.static(1) == 2


@pytest.mark.parametrize("parameters", [("x",), ("x", "factor"), ("scale", "x"), ()])
def test_a_changed_signature_is_refused(victim: ModuleType, parameters: tuple[str, ...]) -> None:
    original = victim.double
    patch = patch_of(victim, "double", *parameters)
    with pytest.raises(RuntimeError, match=r"'x', 'scale'.*1\.2\.3"):
        apply_patch(patch)
    assert victim.double is original


@pytest.mark.parametrize("path", ["triple", "Box.absent", "Absent.method"])
def test_a_missing_target_is_refused(victim: ModuleType, path: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{path}.*1\.2\.3"):
        apply_patch(patch_of(victim, path, "x"))


def test_a_missing_module_is_refused(victim: ModuleType) -> None:
    patch = replace(patch_of(victim, "double", "x"), target="no_such_module_at_all:double")
    with pytest.raises(RuntimeError, match=r"no_such_module_at_all.*versions\.cfg"):
        apply_patch(patch)
