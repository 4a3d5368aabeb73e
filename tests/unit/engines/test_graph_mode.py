"""Which graph mode ``auto`` is, and that a run, its dry run and its engine agree on it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
from support.planned_run import WORLD, expert_config

from mindspeed_rl.command_line.arguments import ParsedArguments
from mindspeed_rl.config import EngineTuningConfig, RLRunConfig
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.core.memory import MemoryOwner, MemoryPhase
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.engines.vllm_ascend.arguments import ascend_arguments
from mindspeed_rl.launch.job import npu_setup_of, sized_for_npu
from mindspeed_rl.planning.budget import machine_on
from mindspeed_rl.planning.findings import find_out
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.report import as_json, decode_line
from mindspeed_rl.planning.suggestions import plan_of

VERSION = "mindspeed_rl.compat.ascend_builds.version"
ONE, SEVERAL = EngineLayout(8, 1), EngineLayout(8, 1, dp=2, expert_parallel=True)


@pytest.fixture(autouse=True)
def _not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(VERSION, version)
    monkeypatch.delenv("ASCEND_LAUNCH_BLOCKING", raising=False)


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(VERSION, lambda name: version)


def chosen(engine: EngineLayout, platform: str, **flags: Any) -> tuple[EngineTuningConfig, str]:
    return engine_provider().tuning(EngineTuningConfig(**flags), engine, platform)


@pytest.mark.parametrize(
    ("engine", "version", "mode"),
    [
        (ONE, "", "full-decode"),
        (SEVERAL, "", "full-decode"),
        (SEVERAL, "0.23.0.post1", "full-decode"),
        (ONE, "0.23.0", "full-decode"),
        (SEVERAL, "0.23.0", "eager"),
        (SEVERAL, "0.23.0+a3", "eager"),
    ],
)
def test_auto_on_an_npu_is_what_the_installed_build_supports(
    engine: EngineLayout, version: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without vLLM-Ascend it is what the pinned build supports."""
    if version:
        install(monkeypatch, version)
    tuning, why = chosen(engine, "npu")
    assert tuning.rollout_graph_mode == mode
    assert tuning.rollout_graph_sizes == (("auto",) if mode == "full-decode" else ())
    assert ("0.23.0.post1" in why) == (mode == "eager")


def test_what_blocks_launches_excludes_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    tuning, why = chosen(ONE, "npu")
    assert tuning.rollout_graph_mode == "eager" and "ASCEND_LAUNCH_BLOCKING" in why


@pytest.mark.parametrize("platform", ["cpu", "cuda", "npu"])
def test_a_mode_and_sizes_that_are_given_stay(platform: str) -> None:
    for mode in ("eager", "piecewise"):
        assert chosen(ONE, platform, rollout_graph_mode=mode) == (
            EngineTuningConfig(rollout_graph_mode=mode),
            "",
        )
    tuning, _ = chosen(ONE, platform, rollout_graph_sizes=("8", "64"))
    assert tuning.rollout_graph_sizes == ("8", "64")
    assert (tuning.rollout_graph_mode == "eager") == (platform != "npu")


def prediction_of(platform: str, *flags: str) -> MemoryPrediction:
    config = expert_config(*flags)
    return MemoryPrediction(config, plan_of(config, WORLD), machine_on(config, platform))


def graph_mib(prediction: MemoryPrediction) -> int:
    table = prediction.rank_table(0)[MemoryPhase.ROLLOUT]
    return table.get(MemoryOwner.GRAPHS, 0) >> 20


@pytest.mark.parametrize(
    ("platform", "flags", "mode", "graphs"),
    [
        ("npu", "", "full-decode", 16),
        ("npu", "--rollout-graph-mode eager", "eager", 0),
        ("npu", "--vllm-max-num-seqs 5", "full-decode", 5),
        ("npu", "--rollout-graph-mode full-decode --vllm-max-num-seqs 64", "full-decode", 11),
        ("npu", "--rollout-graph-sizes 8 64 8", "full-decode", 2),
        ("cpu", "", "eager", 0),
        ("cuda", "", "eager", 0),
    ],
)
def test_the_prediction_counts_the_graphs_and_says_the_mode(
    platform: str, flags: str, mode: str, graphs: int
) -> None:
    prediction = prediction_of(platform, *flags.split())
    assert prediction.num_graphs == graphs
    assert graph_mib(prediction) == graphs * 256
    assert f"decode: {mode}" in decode_line(prediction)


def test_the_dry_run_says_the_mode() -> None:
    for flags, mode in (((), "full-decode"), (("--rollout-graph-mode", "eager"), "eager")):
        said = as_json(find_out(expert_config(*flags), WORLD))["assumptions"]
        assert said["graph_mode"] == mode


MODES = [("0.23.0.post1", "full-decode"), ("0.23.0", "eager")]


@pytest.mark.parametrize(("version", "mode"), MODES)
def test_the_engine_of_a_run_gets_the_mode_and_the_log_the_reason(
    version: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, version)
    flags = ("--platform", "npu", "--rollout-dp", "2", "--rollout-ep", "4", "--rollout-tp", "2")
    config: RLRunConfig = expert_config(*flags)
    parsed: Any = SimpleNamespace(config=config, ignored=())
    setup = npu_setup_of(parsed)
    assert setup is not None
    given = ParsedArguments(config, ())
    sized, setup = sized_for_npu(given, plan_of(config, WORLD), setup)
    engine = sized.config.engine
    assert engine.rollout_graph_mode == mode
    assert ascend_arguments(engine)["enforce_eager"] == (mode == "eager")
    assert mode in " ".join(setup.notes)
