"""Loads the state of one optimizer into two, and of two into one. Local.

With an expert-parallel size above 1 megatron-core has one optimizer for experts and one for all
other parameters, at size 1 a single one. What a checkpoint holds of a parameter is the same, but
for a prefix of its name; beside it are groups of parameters, which belong to the optimizers, and
their step. So a run asks for the tensors by the names that the checkpoint has, keeps its own
groups, and takes the step.

Tensors are megatron-core's objects, which this room does not import: they have a ``key``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_rl.checkpoint.finite import leaves
from mindspeed_rl.checkpoint.metadata_files import INDEX, read_index

OPTIMIZER = "optimizer"
_REGROUPED = "regrouped optimizer"
_CHAINED = re.compile(r"chained_\d+\.")
_STATES = "optimizer.state."


def regrouped(
    wanted: Mapping[str, Any], folder: Path, keep: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return what to ask a checkpoint for, where its optimizers are divided otherwise.

    Args:
        wanted: What the run has, with its optimizer; where that is divided alike, it is returned.
        folder: Folder of the checkpoint's tensors.
        keep: Marks what is not to be read from the checkpoint.
    """
    asked = dict(wanted)
    mine = asked.get(OPTIMIZER)
    if not mine:
        return asked
    names = [name for name in read_index(folder / INDEX).state_dict_metadata if _is_state(name)]
    of_several = any(map(_CHAINED.match, names))
    if names and of_several != all(isinstance(key, int) for key in mine):
        asked[_REGROUPED] = _asked(asked.pop(OPTIMIZER), prefixes(names), keep)
    return asked


def with_own_groups(loaded: dict[str, Any]) -> dict[str, Any]:
    """Return what was loaded, with the optimizer as the run has it and the checkpoint's step."""
    if (mine := loaded.pop(_REGROUPED, None)) is not None:
        give_step(mine, loaded[OPTIMIZER])
        loaded[OPTIMIZER] = mine
    return loaded


def prefixes(names: Iterable[str]) -> dict[str, str]:
    """Return the prefix of every tensor of an optimizer by the rest of its name."""
    return {_plain(name): name.removesuffix(_plain(name)) for name in names}


def give_step(mine: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    """Set the step of an optimizer's state to that of another one, in place.

    megatron-core keeps no step 0 where the optimizer is not distributed.
    """
    found = [value for path, value in leaves(saved) if path[-1] in ("step", "common_step")]
    for part in mine.values() if all(isinstance(key, int) for key in mine) else [mine]:
        inner = part.get("optimizer", part)
        if "state" in inner and found:
            inner["state"]["common_step"] = found[0]
        elif "state" in inner:
            inner["state"].pop("common_step", None)
        for group in inner["param_groups"]:
            if "step" in group and found:
                group["step"] = found[0]


def _is_state(name: str) -> bool:
    return _plain(name).startswith(_STATES)


def _plain(name: str) -> str:
    found = _CHAINED.match(name)
    return name[found.end() :] if found else name


def _asked(tree: Any, prefix_of: Mapping[str, str], keep: Callable[[Any], Any]) -> Any:
    """Return a tree with the names that a checkpoint has; what is no tensor is kept."""
    if not any(hasattr(leaf, "key") for _, leaf in leaves(tree)):
        return keep(_own(tree))
    if isinstance(tree, dict):
        return {key: _asked(value, prefix_of, keep) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_asked(value, prefix_of, keep) for value in tree]
    plain = _plain(tree.key)
    # Of a tensor that is cut into several ones, their names begin with its own.
    names = [plain] if plain in prefix_of else [n for n in prefix_of if n.startswith(plain)]
    tree.key = prefix_of[names[0]] + plain if names else plain
    return tree


def _own(tree: Any) -> Any:
    """Return a tree without the marks by which megatron-core keeps parts of it itself."""
    if isinstance(tree, dict):
        return {key: _own(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_own(value) for value in tree]
    return tree.unwrap() if hasattr(tree, "unwrap") else tree
