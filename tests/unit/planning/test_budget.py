"""One budget and one choice of ``--rl-offload auto`` for dry runs and runs."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.planned_run import RECOMPUTE, WORLD, expert_config
from support.published import PUBLISHED
from support.tiers import slow_but

from mindspeed_rl.building import engine as build_engine
from mindspeed_rl.building.models import Models
from mindspeed_rl.colocation.scheduler import ColocationPlan
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.dry_run import MACHINES
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.memory import LEAVING, MemoryOwner, MemoryPhase, OffloadMode
from mindspeed_rl.launch.job import npu_setup_of
from mindspeed_rl.metrics.metric_set import Max
from mindspeed_rl.planning.budget import device_bytes, machine_on, usable_bytes, with_offload_order
from mindspeed_rl.planning.findings import find_out
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.report import lines
from mindspeed_rl.planning.suggestions import plan_of, suggest
from mindspeed_rl.platforms.base import DeviceMemory
from mindspeed_rl.platforms.cuda import CudaPlatform
from mindspeed_rl.rollout.engine import EngineState
from mindspeed_rl.samples.columns import TOKEN_IDS
from mindspeed_rl.samples.device_cache import TensorCache
from mindspeed_rl.samples.rollout_info import SampleKey

GIB = 2**30


def config_of(*flags: str) -> RLRunConfig:
    return expert_config(*RECOMPUTE, *flags)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of all ranks is that of this one."""
    monkeypatch.setattr(build_engine, "_least", lambda number: number)


def job_on(platform: str, total_gib: int, config: RLRunConfig, taken_gib: int = 0) -> Any:
    """A job on a device of this size."""
    total = total_gib * GIB
    device = SimpleNamespace(
        name=platform,
        shares_host_memory=platform == "cpu",
        taken_bytes=taken_gib * GIB,
        memory=lambda: DeviceMemory(0, total, total),
        release_cached_memory=lambda: None,
        wait_for_copies=lambda: None,
    )
    return SimpleNamespace(
        config=config,
        plan=plan_of(config, WORLD),
        platform=device,
        world=SimpleNamespace(rank=0),
        log_rank0=lambda *lines: None,
    )


def run_on(platform: str, total_gib: int, config: RLRunConfig, taken_gib: int = 0) -> Any:
    """What a run on a device of this size decides."""
    return build_engine.predict_run(job_on(platform, total_gib, config, taken_gib))


@pytest.mark.parametrize("memory_gb", slow_but([40, 55, 61, 66, 73, 128], [61]))
@pytest.mark.parametrize("machine", ["a3", "h200"])
def test_a_run_decides_what_its_dry_run_said(machine: str, memory_gb: int) -> None:
    config = config_of("--rl-dry-run-machine", machine, "--device-memory-gb", str(memory_gb))
    said = find_out(config, WORLD)
    platform = MACHINES[machine].platform
    # the driver reports another size than the flag allows
    prediction, why = run_on(platform, 2 * memory_gb, config)
    assert prediction == said.prediction
    assert why == said.offload_reason
    assert said.budget_bytes == (memory_gb - 2) * GIB


def test_the_choices_differ_with_the_device() -> None:
    """Without the flag the driver's size counts, and every mode is somebody's choice."""
    config = config_of("--rl-dry-run-machine", "h200")
    found = {size: run_on("cuda", size, config)[0].offload for size in (10, 56, 62, 141)}
    assert list(found.values()) == sorted(found.values(), key=list(OffloadMode).index, reverse=True)
    assert set(found.values()) >= {OffloadMode.NONE, OffloadMode.ALL}


@pytest.mark.parametrize(
    ("flag", "owner"),
    [
        ("--reference-pass", MemoryOwner.REFERENCE),
        ("--old-logprob-pass", MemoryOwner.PARAMETERS),
    ],
)
def test_a_model_that_computes_during_rollouts_stays_and_its_pass_counts(
    flag: str, owner: MemoryOwner
) -> None:
    flags = ("--rl-dry-run-machine", "h200", "--expert-model-parallel-size", "2")
    flags += ("--old-logprob", "recompute")
    single, tail = (config_of(*flags, flag, c) for c in ("single", "tail"))
    small = [run_on("cuda", 10, config)[0].offload for config in (single, tail)]
    assert small == [OffloadMode.ALL, OffloadMode.OPTIMIZER]
    prediction = run_on("cuda", 141, tail)[0]
    table = prediction.rank_table(0)[MemoryPhase.ROLLOUT]
    assert table[owner] > 0
    states = 4 * 2048 * 2048 * 2 // 2  # of one sequence, bf16, which two ranks share
    assert states < table.pop(MemoryOwner.ACTIVATIONS) < 64 * states
    assert replace(prediction, config=single).rank_table(0)[MemoryPhase.ROLLOUT] == table
    found = suggest(run_on("cuda", 10, tail)[0], (0,), GIB)
    assert f"{flag} single" in [suggestion.flags for suggestion in found]


def test_a_pass_beside_the_engine_merges_adapters_for_a_moment() -> None:
    """A base whose adapters are switched off is the reference; then the policy has to stay."""
    flags = ("--rl-dry-run-machine", "h200", "--expert-model-parallel-size", "2", "--lora-rank")
    found = []
    for more in ("0", "4"):
        tail = config_of(*flags, more, "--grpo-kl-beta", "0.1", "--reference-pass", "tail")
        assert run_on("cuda", 6, tail)[0].offload is OffloadMode.OPTIMIZER
        found.append(run_on("cuda", 141, tail)[0].rank_table(0)[MemoryPhase.ROLLOUT])
    without, adapted = found
    assert MemoryOwner.REFERENCE in without and MemoryOwner.REFERENCE not in adapted
    assert adapted[MemoryOwner.PARAMETERS] > without[MemoryOwner.PARAMETERS]
    more = adapted[MemoryOwner.ACTIVATIONS] - without[MemoryOwner.ACTIVATIONS]
    assert more >= 8 * 2048 * 768, "of one expert's projection, at least"


def test_the_optimizer_leaves_beside_the_update_where_both_fit() -> None:
    """The device's fullest moment counts it; what is there on the way back stays as it was."""
    flags = ("--rl-dry-run-machine", "h200", "--rl-offload", "all")
    beside = run_on("cuda", 141, config_of(*flags))[0]
    before = replace(beside, order=None)
    assert beside.order.beside_sync
    for rank in beside.representatives():
        table, other = (p.rank_table(rank)[MemoryPhase.SYNC] for p in (beside, before))
        assert table.pop(MemoryOwner.OPTIMIZER) > 0 and table == other
        for state in ("idle", "sync", "rollout", "train"):
            assert beside.border(rank, state) == before.border(rank, state)
    need = beside.peaks(beside.representatives())[MemoryPhase.SYNC]
    for usable, fits in ((need, True), (need - 1, False)):
        found = with_offload_order(before, before.representatives(), usable)
        assert found.order and found.order.beside_sync is fits
        assert found.rank_table(0) == (beside if fits else before).rank_table(0)


@pytest.mark.parametrize(
    ("platform", "flags", "moves"),
    [
        ("cuda", ("--rl-offload", "all", "--rl-offload-overlap", "off"), True),
        ("cpu", ("--rl-offload", "all"), True),
        ("cuda", ("--rl-offload", "none"), False),
        ("npu", ("--rl-offload", "all", "--swap-optimizer"), False),
    ],
)
def test_the_optimizer_leaves_before_the_update_elsewhere(
    platform: str, flags: tuple[str, ...], moves: bool
) -> None:
    order = run_on(platform, 141, config_of(*flags))[0].order
    assert not order.beside_sync if moves else order is None


def test_a_run_keeps_the_order_of_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_engine, "trainer_memory", lambda *engines: {})
    for overlap, late in (("auto", {MemoryOwner.OPTIMIZER}), ("off", set())):
        config = config_of("--rl-offload", "all", "--rl-offload-overlap", overlap)
        sharing = build_engine.share_memory(job_on("cuda", 141, config), Models(cast(Any, None)))
        assert sharing.late == late


def test_the_machine_is_that_of_the_platform_the_run_is_on() -> None:
    """The flag's default is an NPU; a run on CPU must not count HCCL."""
    config = config_of()
    assert machine_on(config).name == machine_on(config, "npu").name == "a3"
    assert machine_on(config, "cpu").communicator_mib == 0
    assert machine_on(config, "cuda").name == "h200"
    assert machine_on(config_of("--rl-dry-run-machine", "a2"), "npu").name == "a2"


def test_blocks_of_latent_attention_are_those_of_the_platform() -> None:
    """vLLM-Ascend has kernels for 128 tokens only."""
    flags = f"--hf-checkpoint {PUBLISHED['deepseek-v3']} --pipeline-model-parallel-size 1"
    config = config_of(*flags.split())
    for machine, tokens in (("a3", 128), ("cpu", 16)):
        engine = MemoryPrediction(config, plan_of(config, WORLD), MACHINES[machine]).engine
        assert engine.sizes.block_tokens == tokens
        assert engine.kv_cache() % (tokens * engine.token_bytes()) == 0


def test_what_is_reserved_is_taken_from_any_device() -> None:
    machine = MACHINES["a3"]
    assert usable_bytes(device_bytes(config_of(), 64 * GIB), machine) == 62 * GIB
    smaller = config_of("--device-memory-gb", "10")
    assert usable_bytes(device_bytes(smaller, 64 * GIB), machine) == 8 * GIB
    assert usable_bytes(GIB, machine) == 0


def test_what_others_hold_is_taken_from_the_device() -> None:
    """As the driver said when the process came; up to the reserve it was expected."""
    machine = MACHINES["a3"]
    assert usable_bytes(64 * GIB, machine, GIB) == 62 * GIB
    assert usable_bytes(64 * GIB, machine, 20 * GIB) == 44 * GIB
    config = config_of("--rl-dry-run-machine", "h200")
    alone = run_on("cuda", 70, config)[0].offload
    beside = run_on("cuda", 70, config, taken_gib=15)[0].offload
    assert list(OffloadMode).index(beside) > list(OffloadMode).index(alone)


def test_accelerators_are_asked_by_their_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Communicators and the engine's unmapped pool are not what torch's counters say."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (47 * GIB, 64 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * GIB)
    platform = CudaPlatform()
    platform.set_device()
    assert platform.taken_bytes == 17 * GIB
    assert platform.memory() == DeviceMemory(17 * GIB, 47 * GIB, 64 * GIB)


def test_a_host_without_a_limit_moves_nothing() -> None:
    prediction, why = run_on("cpu", 16, config_of())
    assert prediction.offload is OffloadMode.NONE and "device is the host" in why
    limited = config_of("--device-memory-gb", "8")
    prediction, why = run_on("cpu", 16, limited)
    assert prediction.offload is OffloadMode.ALL and "exceeds the 7 GiB" in why


SWAP = ("--swap-optimizer", "--rl-offload", "all")


def test_a_swapped_optimizer_is_left_to_mindspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an NPU the phases do not move it; everything else leaves as the mode says."""
    job = job_on("npu", 64, config_of(*SWAP))
    assert build_engine.predict_run(job)[0].swap_parts == 16
    everything = dict.fromkeys(LEAVING)
    monkeypatch.setattr(build_engine, "trainer_memory", lambda *engines: dict(everything))
    sharing = build_engine.share_memory(job, Models(cast(Any, None)))
    assert set(everything) - set(sharing.groups) == {
        MemoryOwner.OPTIMIZER,
        MemoryOwner.CRITIC_OPTIMIZER,
    }


def test_the_ledger_knows_trainer_engine_and_samples() -> None:
    """Samples are counted as they come and go, and no prediction is blamed for them."""
    config = config_of("--platform", "cpu", "--rl-offload", "none")
    parameters = SimpleNamespace(num_bytes=lambda: 700)
    engine = SimpleNamespace(state=EngineState.AWAKE, weight_bytes=50, cache_bytes=6)
    cache = TensorCache(torch.device("cpu"))
    ledger = build_engine.open_ledger(
        job_on("cpu", 2, config),
        cast(Any, SimpleNamespace(groups={MemoryOwner.PARAMETERS: parameters})),
        cast(Any, engine),
        cache,
        cast(Any, SimpleNamespace(kept_bytes=8)),
    )
    cache.begin_step(1)
    cache.put(TOKEN_IDS, [SampleKey(1, 0)], torch.zeros(11, dtype=torch.int32), [11], [0])
    ledger.at_border("rollout")
    engine.state = EngineState.ASLEEP
    ledger.at_border("train")
    metrics = ledger.metrics()
    found = ledger.borders["train"]
    assert ledger.borders["rollout"].owners == {
        "parameters": 700, "engine_weights": 50, "kv_cache": 6, "samples": 44,
    }  # fmt: skip
    assert found.owners == {
        "parameters": 700, "engine_weights": 0, "kv_cache": 0, "samples": 44,
    }  # fmt: skip
    assert metrics["memory/train/samples_bytes"] == Max(44)
    predicted = MemoryPrediction(config, plan_of(config, WORLD)).border(0, "train")
    expected = predicted["parameters"] + predicted["engine_weights"]
    assert metrics["memory/train_predicted_bytes"] == Max(expected)
    cache.begin_step(2)
    ledger.at_border("train")
    assert ledger.borders["train"].owners["samples"] == 0


@pytest.mark.parametrize(
    ("where", "on_host"), [("device", False), ("device", True), ("host", True)]
)
def test_copies_of_what_was_sent_are_predicted_and_counted(where: str, on_host: bool) -> None:
    """In every phase after the first update, where they are in the memory that is counted."""
    flags = ["--rollout-sleep", "kv", "--reshard-deltas", where]
    config = config_of("--platform", "cpu", "--bf16", *flags)
    plan, machine = plan_of(config, WORLD), MACHINES["cpu" if on_host else "a2"]
    tables = MemoryPrediction(config, plan, machine).rank_table(0)
    sizes = {phase: table.get(MemoryOwner.SENT_WEIGHTS, 0) for phase, table in tables.items()}
    parameters = tables[MemoryPhase.TRAIN][MemoryOwner.PARAMETERS]
    assert sizes.pop(MemoryPhase.LOAD) == 0
    assert set(sizes.values()) == {parameters}, "both have two bytes per element"
    off = config_of("--platform", "cpu", "--bf16", "--rollout-sleep", "kv")
    without = MemoryPrediction(off, plan, machine).rank_table(0)
    assert all(MemoryOwner.SENT_WEIGHTS not in table for table in without.values())
    if on_host:
        ledger = build_engine.open_ledger(
            job_on("cpu", 2, config),
            cast(Any, SimpleNamespace(groups={})),
            cast(Any, SimpleNamespace(state=EngineState.ASLEEP, weight_bytes=5, cache_bytes=6)),
            TensorCache(torch.device("cpu")),
            cast(Any, SimpleNamespace(kept_bytes=8)),
        )
        ledger.at_border("train")
        assert ledger.borders["train"].owners["sent_weights"] == 8


def test_a_run_knows_what_its_next_update_takes() -> None:
    """Twice the staging, and copies of what was sent as long as there are none."""
    flags = ("--rollout-sleep", "kv", "--reshard-deltas", "device", "--reshard-bucket-mb", "2")
    config, sync = config_of("--bf16", *flags), SimpleNamespace(kept_bytes=0)
    job, ledger = job_on("cuda", 141, config), SimpleNamespace(require_free=print, at_border=print)
    plan = build_engine.watched(job, ColocationPlan(), cast(Any, ledger), cast(Any, sync))
    tables = MemoryPrediction(config, job.plan, machine_on(config, "cuda")).rank_table(0)
    sent = tables[MemoryPhase.SYNC][MemoryOwner.SENT_WEIGHTS]
    assert sent > 0 and plan.sync_bytes() == 4 * 2**20 + sent
    sync.kept_bytes = sent - 100
    assert plan.sync_bytes() == 4 * 2**20 + 100
    assert plan.require_free is print and plan.at_border is print


def test_what_changes_of_weights_take_of_the_host_is_told() -> None:
    """Of Qwen3-30B-A3B in bf16, counted by hand: copies of what was sent, and a sleeping engine."""
    attention = 2 * 4096 * 2048 + 2 * 512 * 2048  # queries and output, keys and values
    whole = 2 * 128 + 2 * 2048 + 128 * 2048  # norms, router
    expert = 3 * 768 * 2048
    # 48 layers with 8 of 128 experts; embedding and head in halves of 151,936 rows; a norm
    engine = 48 * (attention // 2 + whole + 8 * expert) + 151936 * 2048 + 2048
    # the second stage: 24 layers with 16 experts; half of a head that is padded to 152,064 rows
    trainer = 24 * (attention // 2 + whole + 16 * expert) + 76032 * 2048 + 2048
    asleep, awake = ("--rl-offload", "all"), ("--rollout-sleep", "kv")
    expected = {
        ("device", asleep): (0, 2 * engine), ("host", asleep): (2 * trainer, 2 * engine),
        ("device", awake): (0, 0), ("host", awake): (2 * trainer, 0), ("off", asleep): (0, 0),
    }  # fmt: skip
    for (where, sleep), sizes in expected.items():
        config = config_of("--reshard-deltas", where, *sleep)
        plan, mode = plan_of(config, WORLD), OffloadMode("all" if sleep is asleep else "none")
        prediction = MemoryPrediction(config, plan, machine_on(config, "cuda"), mode)
        assert prediction.delta_host_bytes(17) == sizes, (where, sleep)
        on_cpu = replace(prediction, machine=MACHINES["cpu"])
        assert on_cpu.delta_host_bytes(17) == (0, 0), "there it is memory of the device"


def test_the_dry_run_prints_what_changes_take_of_a_node() -> None:
    config = config_of(
        "--reshard-deltas", "host", "--rl-offload", "all", "--rl-dry-run-machine", "h200"
    )
    found = find_out(config, WORLD)
    sent, asleep = found.prediction.delta_host_bytes(0)
    ((of_rank, of_engine, of_node),) = re.findall(
        r"up to ([\d.]+) GiB of the host .* sent, and ([\d.]+) GiB for .* ([\d.]+) GiB of a node",
        "\n".join(lines(found)),
    )
    assert float(of_rank) == pytest.approx(sent / GIB, abs=0.01)
    assert float(of_engine) == pytest.approx(asleep / GIB, abs=0.01)
    assert float(of_node) == pytest.approx(8 * (sent + asleep) / GIB, abs=0.1)


def test_copies_on_the_host_take_nothing_of_a_device() -> None:
    config = config_of("--platform", "cpu", "--rollout-sleep", "kv", "--reshard-deltas", "host")
    tables = MemoryPrediction(config, plan_of(config, WORLD), MACHINES["a2"]).rank_table(0)
    assert all(MemoryOwner.SENT_WEIGHTS not in table for table in tables.values())


def test_a_swapped_optimizer_is_refused_where_nobody_swaps_it() -> None:
    config = config_of(*SWAP, "--platform", "cpu")
    with pytest.raises(ValueError, match="--swap-optimizer"):
        npu_setup_of(cast(Any, SimpleNamespace(config=config)))
    assert npu_setup_of(cast(Any, SimpleNamespace(config=config_of("--platform", "cpu")))) is None


@pytest.mark.slow
def test_a_dry_run_says_who_swaps_the_optimizer() -> None:
    swapped = "\n".join(lines(find_out(config_of(*SWAP), WORLD)))
    assert re.search(r" 16 .*--swap-optimizer", swapped)
    with pytest.raises(UsageError, match=r"--swap-optimizer .*cuda"):
        find_out(config_of(*SWAP, "--rl-dry-run-machine", "h200"), WORLD)
