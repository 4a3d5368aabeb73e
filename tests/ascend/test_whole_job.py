"""A whole RL job on two emulated NPUs, as a user starts it: ``train_rl`` with its flags.

Each step trains, gives its memory to vLLM-Ascend's engine, reshards the live weights into the
engine's parameters, samples at temperature 0.7 and takes the engine's log-probs as old ones. After
three steps the job is saved; the fourth is compared with that of a job that resumes there.

The same job on the CPU trains on the tokens that were sampled on the NPUs: a generator of another
device draws other tokens from the same seed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend.npu_ranks import needs_mindspeed, run_npu_job
from ascend.test_engine import TOLERANCES, assert_restored, logprobs
from ascend.whole_job import Noted, WholeJob
from support.family_reshard import differing, oracle_bits
from support.whole_runs import comparable_rows, rows_of, write_inputs

pytestmark = pytest.mark.ascend_emul

TEMPERATURE, RESPONSE = 0.7, 16
STEPS, SAVED, UPDATES_PER_STEP = 4, 3, 2
SAMPLES = 8
# Of the tiny models.
ROWS, VOCABULARY = 307, ("model.embed_tokens.weight", "lm_head.weight")
# What torch replaces itself when its compiler is imported.
COMPILER = {"torch.nn.Module.__init__", "torch.nn.Module.__setstate__"}
FLAGS = (
    "--hf-checkpoint model --prompt-data train.jsonl --make-vocab-size-divisible-by 8 "
    "--reward-function reward.py:digits --max-prompt-length 24 "
    f"--rollout-max-response-length {RESPONSE} --rl-default-temperature {TEMPERATURE} "
    f"--train-iters {STEPS} --grpo-prompts-per-step 2 --grpo-group-size 4 --global-batch-size 4 "
    "--micro-batch-size 2 --lr 1e-3 --use-distributed-optimizer --old-logprob rollout "
    f"--reshard-verify-interval 1 --rl-offload all --log-rollouts {SAMPLES} "
).split()
# Of the engine, whose start would otherwise compute with 8192 tokens and capture graphs, as only
# a device can.
ENGINE = (
    *("--vllm-max-num-seqs", "16", "--vllm-max-num-batched-tokens", "256"),
    *("--rollout-graph-mode", "eager"),
)
EXPERTS = ("--expert-model-parallel-size", "2", "--rollout-dp", "2", "--rollout-ep", "2")
LAYOUTS = {
    "qwen2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "qwen3_moe": EXPERTS,
    "deepseek_v3": EXPERTS,
}
# Share of tokens whose groups of experts are so close that the rounding of prompts to bf16, which
# the tolerance is for, sends them to the other group.
NEAR_TIES = {"deepseek_v3": 0.01}
# Updates of Adam turn a rounding of a gradient near zero into a step of the learning rate, so that
# later steps are compared less closely than the first. Measured of the first: 1e-7.
CPU_TOLERANCES = {1: 1e-5, 2: 1e-4, 3: 1e-4, 4: 1e-4}


@dataclass(frozen=True)
class Way:
    """A job to run.

    Attributes:
        family: of the model.
        mindspeed: with its real adaptor.
        flags: further ones.
    """

    family: str
    mindspeed: bool = False
    flags: tuple[str, ...] = ()


BESIDE_MINDSPEED = [needs_mindspeed, pytest.mark.slow]
SWAPPED = ("--swap-optimizer", "--swap-optimizer-times", "3")
WAYS = [
    *(pytest.param(Way(family), id=family, marks=pytest.mark.slow) for family in LAYOUTS),
    *(
        pytest.param(Way(family, True), id=f"{family}-mindspeed", marks=BESIDE_MINDSPEED)
        for family in LAYOUTS
    ),
    pytest.param(
        Way("qwen3_moe", True, SWAPPED), id="qwen3_moe-swapped-optimizer", marks=BESIDE_MINDSPEED
    ),
]


@dataclass(frozen=True)
class Jobs:
    """What a way left: ``out`` of the whole job, ``again`` of the resumed, ``cpu`` of the CPU's."""

    way: Way
    folder: Path
    whole: list[Noted]
    resumed: list[Noted]

    @property
    def tolerance(self) -> float:
        """Of log-probs."""
        return TOLERANCES[self.way.family]

    def weights(self, version: int) -> str:
        """The trainer's weights after so many updates."""
        return str(self.folder / "weights" / str(version))


def run_on_npus(way: Way, folder: Path, name: str, flags: Sequence[str]) -> list[Noted]:
    limit = ("--rl-max-logprob-diff", str(TOLERANCES[way.family]))
    places = ("--platform", "npu", "--output-dir", name, "--save", f"{name}-save")
    argv = [*FLAGS, *ENGINE, *LAYOUTS[way.family], *limit, *places, *way.flags, *flags]
    weights = folder / ("weights" if name == "out" else f"{name}-weights")
    job = WholeJob([*argv, "--save-interval", str(SAVED)], folder, weights)
    return run_npu_job(job, 2, work_dir=folder / f"{name}-ranks", mindspeed=way.mindspeed)


@pytest.fixture(scope="module", params=WAYS)
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """The whole job, and one that resumes where it was after three steps."""
    way: Way = request.param
    folder = tmp_path_factory.mktemp(way.family)
    write_inputs(folder, SAMPLES, family=way.family)
    whole = run_on_npus(way, folder, "out", [])
    for name in ("", "-save"):
        shutil.copytree(folder / f"out{name}", folder / f"again{name}")
    shutil.rmtree(folder / "again-save" / f"iter_{STEPS:07d}")
    resumed = run_on_npus(way, folder, "again", ["--load", "again-save"])
    return Jobs(way, folder, whole, resumed)


def test_it_trains_on_what_its_engine_samples(jobs: Jobs) -> None:
    """Log-probs of trainer and engine, of all tokens of all steps, from live weights."""
    rows = rows_of(jobs.folder / "out")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert 0.0 < row["mismatch/max_abs_logprob"] <= jobs.tolerance, row["step"]
        assert row["policy/ratio_first_step_max_deviation"] <= 1.5 * jobs.tolerance
        assert row["policy/ratio_max_deviation"] > 0.01, "the second update is off-policy"
        assert row["optimizer/grad_norm"] > 0.0 and row["optimizer/skipped"] == 0.0
    assert all(noted.has_mindspeed is jobs.way.mindspeed for noted in jobs.whole)


def test_what_is_sampled_comes_from_the_weights_of_the_step(jobs: Jobs) -> None:
    """Of transformers with the trainer's weights, gathered at the same sync."""
    seen, differences = set(), []
    for noted in jobs.whole:
        assert [len(call) for call in noted.responses] == [1, *[SAMPLES // 2] * STEPS]
        for prompts, call in zip(noted.prompts[1:], noted.responses[1:], strict=True):
            for i, done in call.items():
                folder = jobs.weights(done.weights_version)
                expected = logprobs(folder, prompts[i], done.token_ids, TEMPERATURE)
                differences += map(abs, map(float.__sub__, done.logprobs, expected))
                seen.add((done.weights_version, done.token_ids))
    share = NEAR_TIES.get(jobs.way.family, 0.0)
    assert sum(d > jobs.tolerance for d in differences) <= share * len(differences)
    assert max(differences) < 0.2, "whatever experts a token goes to"
    assert {version for version, _ in seen} == {UPDATES_PER_STEP * n for n in range(STEPS)}
    lengths = [len(tokens) for _, tokens in seen]
    assert len(seen) > SAMPLES * STEPS - 4 and lengths.count(RESPONSE) > len(seen) // 2


def test_the_engine_has_the_bits_of_the_trainer_after_every_sync(jobs: Jobs) -> None:
    """Those of an oracle that knows both layouts and shares no code with the reshard."""
    experts = {"engine_dp": 2, "engine_ep": True, "transposed": True}
    engine = {} if jobs.way.family == "qwen2" else experts
    versions = [UPDATES_PER_STEP * n for n in range(STEPS + 1)]
    for rank, noted in enumerate(jobs.whole):
        assert list(noted.engine_weights) == versions
        for version, weights in noted.engine_weights.items():
            found = dict(weights)
            bits = oracle_bits(jobs.weights(version), rank, torch.float32, **engine)
            expected = {n.replace("routed_experts.", ""): b for n, b in bits.items()}
            for name in VOCABULARY:  # the rows behind belong to no tensor
                found[name], expected[name] = found[name][:ROWS], expected[name][:ROWS]
            assert differing(found, expected) == [], (rank, version)
    first, last = (jobs.whole[0].engine_weights[v] for v in (versions[0], versions[-1]))
    untrained = "e_score_correction_bias"
    assert all(not torch.equal(first[n], last[n]) for n in first if untrained not in n)


def test_memory_of_the_engine_leaves_while_the_trainer_trains(jobs: Jobs) -> None:
    """By the driver of the device, and by the job's own books."""
    for noted in jobs.whole:
        assert len(noted.freed) > STEPS
        assert all(freed == owned > 0 for freed, owned in noted.freed)
    for row in rows_of(jobs.folder / "out"):
        train = {n: row[f"memory/train/{n}_bytes"] for n in ("engine_weights", "kv_cache")}
        assert train == {"engine_weights": 0.0, "kv_cache": 0.0}
        assert row["memory/rollout/engine_weights_bytes"] > 0.0
        assert row["memory/rollout/parameters_bytes"] == 0.0
        # MindSpeed's swapped state has no owner here
        assert row.get("memory/rollout/optimizer_bytes", 0.0) == 0.0


def test_a_resumed_job_goes_on_with_the_same_numbers(jobs: Jobs) -> None:
    """Metrics, tokens with their log-probs, and weights, to the bit."""
    # what is owned before the first update of a process differs: optimizer states come with it
    expected, found = (comparable_rows(jobs.folder / name) for name in ("out", "again"))
    assert found == expected and [row["step"] for row in found] == list(range(1, STEPS + 1))
    said = [(jobs.folder / name / "rollouts.jsonl").read_text() for name in ("out", "again")]
    assert said[0] == said[1] and len(said[0].splitlines()) == SAMPLES * STEPS
    last = UPDATES_PER_STEP * STEPS
    for whole, resumed in zip(jobs.whole, jobs.resumed, strict=True):
        assert resumed.responses[-1] == whole.responses[-1]
        assert list(resumed.engine_weights) == [UPDATES_PER_STEP * SAVED, last]
        for version, weights in resumed.engine_weights.items():
            same = whole.engine_weights[version]
            assert all(torch.equal(weights[name], value) for name, value in same.items())


def test_the_cpu_trains_alike_on_the_same_tokens(jobs: Jobs) -> None:
    """Rewards, loss and gradient norm of all steps; the CPU's job has no engine of its own."""
    argv = [*FLAGS, *LAYOUTS[jobs.way.family], "--platform", "cpu", "--output-dir", "cpu"]
    replay = [noted.responses for noted in jobs.whole]
    job = WholeJob(argv, jobs.folder, jobs.folder / "cpu-weights", replay)
    run_npu_job(job, 2, work_dir=jobs.folder / "cpu-ranks", platform="cpu")
    found, expected = (rows_of(jobs.folder / name) for name in ("out", "cpu"))
    for row, twin in zip(found, expected, strict=True):
        assert row["reward/mean"] == twin["reward/mean"]
        near = CPU_TOLERANCES[int(row["step"])]
        for name in ("loss/policy", "optimizer/grad_norm", "policy/entropy"):
            assert row[name] == pytest.approx(twin[name], rel=near, abs=1e-6), (row["step"], name)


def test_the_process_is_as_it_was(jobs: Jobs) -> None:
    """Functions of torch and Python, whichever import of vLLM came first."""
    for noted in jobs.whole:
        changed = {n: c for n, c in noted.replaced.items() if n not in COMPILER}
        assert_restored({"replaced": changed})


def test_its_summary_and_export_are_complete(jobs: Jobs) -> None:
    """The exported model has the last weights."""
    from safetensors.torch import load_file

    summary: Mapping[str, Any] = json.loads((jobs.folder / "out" / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["worst_mismatch"] <= jobs.tolerance
    exported = load_file(jobs.folder / "out" / "hf" / "model.safetensors")
    trained = load_file(Path(jobs.weights(UPDATES_PER_STEP * STEPS)) / "model.safetensors")
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name].float(), value) for name, value in trained.items())
