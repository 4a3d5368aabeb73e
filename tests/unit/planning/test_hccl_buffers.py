"""HCCL's buffers: large enough for the dispatch of experts, and no larger for the other groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.published import PUBLISHED

from mindspeed_rl import doctor
from mindspeed_rl.command_line.arguments import ParsedArguments, parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.npu import group_buffers
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.groups import MEGATRON_GROUPS
from mindspeed_rl.diagnosis.rows import Status
from mindspeed_rl.launch import bootstrap, job
from mindspeed_rl.launch.job import npu_setup_of, sized_for_npu
from mindspeed_rl.planning.budget import machine_on
from mindspeed_rl.planning.findings import find_out
from mindspeed_rl.planning.hccl_buffers import hccl_buffers
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.report import as_json, lines
from mindspeed_rl.planning.suggestions import plan_of

WORLD, NEEDED_MB = 256, 240
# DeepSeek-R1 on 256 dies, of which 128 share the experts: 32 tokens of a rank at once.
R1 = f"""--hf-checkpoint {PUBLISHED["deepseek-v3"]} --prompt-data y --train-iters 1 --bf16
    --platform npu --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8
    --num-layer-list 7,7,8,8,8,8,8,7 --expert-model-parallel-size 8 --moe-tp-extend-ep
    --sequence-parallel --use-distributed-optimizer --rollout-tp 2 --rollout-dp 64
    --rollout-ep 128 --vllm-max-num-seqs 64 --rollout-kv-cache-gb 20
    --grpo-prompts-per-step 512 --grpo-group-size 16""".split()


def parsed(*flags: str) -> ParsedArguments[RLRunConfig]:
    return parse(RLRunConfig, [*R1, *flags], "test")


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)


def sized(*flags: str) -> tuple[ParsedArguments[RLRunConfig], Any]:
    given = parsed(*flags)
    setup = npu_setup_of(given)
    assert setup is not None
    return sized_for_npu(given, plan_of(given.config, WORLD), setup)


def sizes_of(config: RLRunConfig, platform: str | None = None) -> dict[str, int]:
    """MiB of the groups of rank 0."""
    prediction = MemoryPrediction(config, plan_of(config, WORLD), machine_on(config, platform))
    return {name: size >> 20 for name, size in prediction.group_bytes(0).items()}


def test_a_run_sets_what_the_dispatch_needs_and_keeps_the_groups_of_the_trainer() -> None:
    config, setup = sized("--hccl-group-buffer", "pp:64")
    assert setup.buffer_mb == NEEDED_MB
    assert setup.group_buffers_mb == dict.fromkeys(MEGATRON_GROUPS, 200) | {"pp": 64}
    assert group_buffers(config.config.ascend.hccl_group_buffer) == setup.group_buffers_mb


def test_a_run_holds_what_its_dry_run_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the variable has been set. The world's group and the engine's dispatch grow."""
    said = sizes_of(parsed().config)
    assert said["world"] == said["rollout mc2"] == 2 * NEEDED_MB
    assert said["tp"] == said["pp"] == said["ep"] == said["rollout ep"] == 400
    config, setup = sized()
    monkeypatch.setenv("HCCL_BUFFSIZE", str(setup.buffer_mb))
    assert sizes_of(config.config, "npu") == said


def test_the_users_value_wins_for_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "300")
    config, setup = sized()
    assert setup.buffer_mb == 0 and setup.group_buffers_mb == {}
    found = sizes_of(config.config)
    assert found["tp"] == found["world"] == found["rollout mc2"] == 600


@pytest.mark.parametrize("value", ["239", "200", "0", "300MB", ""])
def test_too_little_is_refused_with_what_is_needed(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the start, the dry run and the doctor."""
    monkeypatch.setenv("HCCL_BUFFSIZE", value)
    for refuse in (sized, lambda: find_out(parsed().config, WORLD)):
        with pytest.raises(UsageError, match=f"HCCL_BUFFSIZE={value}.*{NEEDED_MB}"):
            refuse()
    _, rows = doctor.layout_rows(parsed().config, "npu", bootstrap.World(0, WORLD, 0, 16))
    assert [row.status for row in rows] == [Status.NOTE, Status.RED]
    assert str(NEEDED_MB) in rows[1].what


def test_a_start_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned, set before torch_npu is imported, and told; so is the mode of graphs."""
    given: dict[str, Any] = {}

    def prepare(platform: str, environ: Any, **settings: Any) -> list[str]:
        given.update(settings)
        return ["a note on the environment"]

    # There is no checkpoint, only its config.json.
    monkeypatch.setattr(job, "check_model_flags", lambda *_, **__: None)
    monkeypatch.setattr(bootstrap, "prepare_environment", prepare)
    monkeypatch.setattr(job.machine, "check_machine", lambda *_, **__: None)
    monkeypatch.setattr(job, "bind_cores", lambda choice, *_: [f"cores: {choice}"])
    checked = job.plan_run(parsed("--npu-deterministic"), plan_of, WORLD)
    notes = job.prepare_rank(checked)
    assert given.pop("longest_phase_s") > 1800, "that of the phase which generates"
    assert given == {"deterministic": True, "buffer_mb": NEEDED_MB}
    assert checked.parsed.config.engine.rollout_graph_mode == "full-decode"
    assert checked.setup is not None and checked.setup.group_buffers_mb["pp"] == 200
    assert notes[:2] == ["a note on the environment", "cores: auto"]
    assert any("--rollout-graph-mode auto is full-decode" in note for note in notes)


def test_dry_run_and_doctor_say_it() -> None:
    found = find_out(parsed().config, WORLD)
    assert any("HCCL_BUFFSIZE 240 MiB" in line for line in lines(found))
    assert as_json(found)["assumptions"]["hccl_buffsize_mb"] == NEEDED_MB
    _, rows = doctor.layout_rows(parsed().config, "npu", bootstrap.World(0, WORLD, 0, 16))
    assert [row.status for row in rows] == [Status.NOTE] * 2
    assert "HCCL_BUFFSIZE 240" in rows[1].what


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        (["--vllm-max-num-seqs", "32"], 120),
        (["--rollout-graph-sizes", "128"], 480),
        (["--rl-dry-run-machine", "a2"], 228),
        (["--rollout-dp", "1", "--rollout-ep", "1"], 0),
    ],
)
def test_it_follows_flags_and_machine(flags: list[str], needed: int) -> None:
    config = parsed(*flags).config
    plan, name = plan_of(config, WORLD), machine_on(config).name
    assert hccl_buffers(config, plan, name, {}).needed_mb == needed


def test_copies_of_experts_are_refused_where_the_dispatch_loses_them(tmp_path: Path) -> None:
    """On an A2, in a start and a dry run; other maps are not."""
    ranks = [[2 * rank, 2 * rank + 1] for rank in range(128)]
    copies = [[*experts, (experts[0] + 7) % 256] for experts in ranks]
    for name, order in (("moved", [ranks[1], ranks[0], *ranks[2:]]), ("copies", copies)):
        devices = [{"device_expert": experts} for experts in order]
        layers = [{"layer_id": layer, "device_list": devices} for layer in range(58)]
        (tmp_path / f"{name}.json").write_text(json.dumps({"layer_list": layers}))

    def starts(name: str, machine: str) -> None:
        flags = "--rollout-expert-map", str(tmp_path / f"{name}.json")
        sized(*flags, "--rl-dry-run-machine", machine)
        find_out(parsed(*flags, "--rl-dry-run-machine", machine).config, WORLD)

    starts("moved", "a2")
    starts("copies", "a3")
    copied = ["--rollout-expert-map", str(tmp_path / "copies.json"), "--rl-dry-run-machine", "a2"]
    for refused in (sized, lambda *flags: find_out(parsed(*flags).config, WORLD)):
        with pytest.raises(UsageError, match="--rollout-expert-map: on an Atlas A2"):
            refused(*copied)


def test_what_fits_changes_nothing() -> None:
    config, setup = sized("--vllm-max-num-seqs", "32")
    assert setup.buffer_mb == 0 and setup.group_buffers_mb == {}
    assert config.config.ascend.hccl_group_buffer == ""
