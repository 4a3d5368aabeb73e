"""What a user may choose by name is declared once, beside the formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rl.algorithms.advantages import (
    ESTIMATORS,
    AdvantageSettings,
    GroupRewards,
    TokenRewards,
)
from mindspeed_rl.algorithms.aggregation import AGGREGATIONS
from mindspeed_rl.algorithms.catalogue import Catalogue, Choice
from mindspeed_rl.algorithms.kl import KL_ESTIMATORS
from mindspeed_rl.algorithms.policy_losses import POLICY_LOSSES, SurrogateSettings
from mindspeed_rl.algorithms.types import LossInputs, Sequences
from mindspeed_rl.command_line.arguments import build_parser, own_flags
from mindspeed_rl.config import RLRunConfig

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"
CATALOGUES: tuple[Catalogue[Any], ...] = (ESTIMATORS, POLICY_LOSSES, AGGREGATIONS, KL_ESTIMATORS)
# read by the selection of tokens, which comes before the loss
SELECTION = {"cov_ratio", "clip_cov_lower", "clip_cov_upper"}
ONES = torch.ones(1)


@pytest.mark.parametrize("catalogue", CATALOGUES, ids=lambda catalogue: catalogue.flag)
def test_a_declaration_reaches_the_flag_its_help_and_the_page(catalogue: Catalogue[Any]) -> None:
    flags = {f.spellings[0]: f for _, own in own_flags(RLRunConfig) for f in own}
    choices, page = flags[catalogue.flag].info.choices, PAGE.read_text()
    assert tuple(name for name in choices if name != "auto") == tuple(catalogue)
    told = " ".join(build_parser(RLRunConfig, "test").format_help().split())
    for name, choice in catalogue.items():
        assert f"{name}: {choice.summary}" in told
        assert f"| `{name}` | {choice.summary.replace('|', chr(92) + '|')} |" in page
        assert choice.source in page


class Recorder:
    """Settings that remember which of them are read."""

    def __init__(self, settings: object) -> None:
        self.settings, self.read = settings, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.settings, name)


def read_by(function: Callable[[Any], object], settings: object) -> set[str]:
    recorder = Recorder(settings)
    function(recorder)
    return recorder.read


def loss_inputs() -> LossInputs:
    sequences = Sequences(torch.zeros(1, dtype=torch.int64), ONES)
    return LossInputs(-ONES, ONES, -ONES, -ONES, None, ONES, sequences, ONES.bool())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_reads_what_it_declares(name: str) -> None:
    loss = POLICY_LOSSES[name]
    found = read_by(lambda s: loss.formula(loss_inputs(), s), SurrogateSettings())
    assert found == set(loss.reads) - SELECTION
    assert loss.selects == bool(SELECTION & set(loss.reads))
    assert loss.aggregation in AGGREGATIONS


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_reads_what_it_declares(name: str) -> None:
    estimator = ESTIMATORS[name]

    def estimate(settings: Any) -> None:
        estimator.formula(GroupRewards(ONES[None], ONES[None], ONES), settings)
        if estimator.of_tokens is not None:
            estimator.of_tokens(TokenRewards(ONES, [1], ONES), settings)

    assert read_by(estimate, AdvantageSettings()) == set(estimator.reads)


@pytest.mark.parametrize(
    ("catalogue", "settings"), [(ESTIMATORS, AdvantageSettings), (POLICY_LOSSES, SurrogateSettings)]
)
def test_every_setting_has_a_reader(catalogue: Catalogue[Any], settings: type[Any]) -> None:
    unread = [f.name for f in dataclasses.fields(settings) if not catalogue.readers(f.name)]
    assert not unread


def test_a_name_is_taken_once() -> None:
    catalogue = Catalogue("--flag", Choice)
    catalogue.declare("first", name="one")(abs)
    with pytest.raises(ValueError, match="--flag one"):
        catalogue.declare("second", name="one")(abs)
