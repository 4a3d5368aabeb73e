"""One optimizer's state asked for by the names of two, and the reverse."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
)

from mindspeed_rl.checkpoint.expert_optimizers import (
    give_step,
    prefixes,
    regrouped,
    with_own_groups,
)

DENSE, EXPERT = "optimizer.state.exp_avg.qkv.weight", "optimizer.state.exp_avg.experts.fc1"


@dataclass
class Tensor:
    """A place of a tensor in a checkpoint, as megatron-core has them."""

    key: str


@dataclass(frozen=True)
class Kept:
    value: Any

    def unwrap(self) -> Any:
        return self.value


def write_index(folder: Path, *names: str) -> None:
    entries: dict[str, Any] = {name: BytesStorageMetadata() for name in (*names, "model.weight")}
    (folder / ".metadata").write_bytes(
        pickle.dumps(Metadata(state_dict_metadata=entries, storage_data={}))
    )


def single(step: float) -> dict[str, Any]:
    """The state of a distributed optimizer of all parameters."""
    groups = [{"params": [0, 1], "step": step}]
    return {
        "optimizer": {"param_groups": groups},
        "param_state": {0: {"exp_avg": Tensor(DENSE)}, 1: {"exp_avg": Tensor(EXPERT)}},
    }


def divided(step: float) -> dict[Any, Any]:
    """Those of the optimizers of experts and of the rest, without a distributed optimizer."""
    return {
        number: {
            "state": {0: {"exp_avg": Tensor(f"chained_{number}.{name}")}, "common_step": step},
            "param_groups": [{"params": Kept([0])}],  # megatron-core keeps these itself
        }
        for number, name in enumerate((DENSE, EXPERT))
    }


def test_tensors_get_the_names_of_the_checkpoint_and_groups_stay(tmp_path: Path) -> None:
    write_index(tmp_path, f"chained_0.{DENSE}", f"chained_1.{EXPERT}.part")
    wanted = {"model": "m", "optimizer": single(3.0)}
    asked = regrouped(wanted, tmp_path, Kept)
    assert set(asked) == {"model", "regrouped optimizer"}
    mine = asked["regrouped optimizer"]
    assert mine["optimizer"] == Kept({"param_groups": [{"params": [0, 1], "step": 3.0}]})
    assert mine["param_state"][0]["exp_avg"] == Tensor(f"chained_0.{DENSE}")
    assert mine["param_state"][1]["exp_avg"] == Tensor(f"chained_1.{EXPERT}"), (
        "it is cut into parts"
    )


def test_names_of_two_optimizers_become_those_of_one(tmp_path: Path) -> None:
    write_index(tmp_path, DENSE, EXPERT)
    asked = regrouped({"optimizer": divided(2.0)}, tmp_path, Kept)["regrouped optimizer"]
    assert [asked[n]["state"][0]["exp_avg"].key for n in (0, 1)] == [DENSE, EXPERT]
    assert asked[1]["state"]["common_step"] == Kept(2.0)
    assert asked[1]["param_groups"] == Kept([{"params": [0]}]), "kept once"


@pytest.mark.parametrize("saved", [(DENSE, EXPERT), ()])
def test_what_is_divided_alike_stays(tmp_path: Path, saved: tuple[str, ...]) -> None:
    write_index(tmp_path, *saved)
    for wanted in ({"optimizer": single(1.0)}, {"model": "m"}):
        assert regrouped(wanted, tmp_path, Kept) == wanted
    assert with_own_groups({"optimizer": "saved"}) == {"optimizer": "saved"}


def test_the_step_is_that_of_the_checkpoint() -> None:
    loaded = {"regrouped optimizer": single(3.0), "optimizer": divided(7.0)}
    mine = with_own_groups(loaded)
    assert set(mine) == {"optimizer"}
    assert mine["optimizer"]["optimizer"]["param_groups"][0]["step"] == 7.0
    other = divided(3.0)
    give_step(other, single(5.0))
    assert [part["state"]["common_step"] for part in other.values()] == [5.0, 5.0]
    give_step(other, {"state": {}, "param_groups": [{"params": [0]}]})
    assert all("common_step" not in part["state"] for part in other.values()), "step 0 is not kept"


def test_prefixes_are_those_of_optimizers() -> None:
    assert prefixes([f"chained_12.{DENSE}", EXPERT]) == {DENSE: "chained_12.", EXPERT: ""}
