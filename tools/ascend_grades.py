"""Writes the table of docs/ascend.md: python tools/ascend_grades.py [--check].

Every claim about Ascend NPUs is a row with the grade of its evidence and the test that is the
evidence. A unit test checks that those tests exist and that the table is up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "docs" / "ascend.md"
BEGIN, END = "<!-- grades: written by tools/ascend_grades.py -->\n", "<!-- end of grades -->\n"


class Grade(Enum):
    """How a claim is known, best first."""

    HARDWARE = "executed on hardware"
    EMULATED = "emulated"
    SIGNATURE = "signature-checked"
    UNVERIFIED = "unverified"


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim.

    Attributes:
        area: heading.
        what: the claim.
        grade: of its evidence.
        evidence: ``file::test``; empty only for unverified claims.
        with_mindspeed: the evidence is skipped without ``MINDSPEED_PATH``.
        limits: what the evidence does not cover.
    """

    area: str
    what: str
    grade: Grade
    evidence: str = ""
    with_mindspeed: bool = False
    limits: str = ""


_BOOT, _FAMILIES = "tests/ascend/test_bootstrap.py::", "tests/ascend/test_families.py::"
_EMULATOR, _MOVEMENT = "tests/ascend/test_emulator.py::", "tests/ascend/test_movement.py::"
_FLAGS = "tests/unit/test_npu_flags.py::"
_E, _S, _U = Grade.EMULATED, Grade.SIGNATURE, Grade.UNVERIFIED

START = "Start of a process"
TRAINER = "Trainer"
FEATURES = "MindSpeed's features"
MOVEMENT = "Weights, samples, memory"
ENGINE = "Rollout engine"
_WEIGHTS, _ENGINE = "tests/ascend/test_engine_weights.py::", "tests/unit/test_ascend_engine.py::"
_REFUSED = "tests/unit/test_ascend_refusals.py::"
_VERSIONS, _API = "tests/unit/test_ascend_versions.py::", "tests/unit/test_ascend_api.py::"

CLAIMS: tuple[Claim, ...] = (
    Claim(START, "`--platform auto` takes the NPU; torch_npu loads with torch or after it", _E,
          _BOOT + "test_without_mindspeed_torch_npu_answers_for_cuda"),
    Claim(START, "the adaptor sees a clean command line, features through `repatch` once, before "
          "the first process group; `torch.compile`, `torch.jit.script`, Triton's drivers and "
          "made-up modules are as vLLM needs them afterwards", _E,
          _BOOT + "test_the_adaptor_changes_nothing_for_others",
          limits="stand-in of MindSpeed; the real one: next rows"),
    Claim(START, "the real adaptor with a hostile command line, then vLLM and vLLM-Ascend's "
          "experts imported in the same process: its patches are in force, no made-up flash_attn "
          "is left, `torch.compile` is torch's, the command line is as it was", _E,
          _BOOT + "test_vllm_is_imported_behind_the_real_adaptor", True,
          limits="Triton, acl and torchvision are stand-ins; no engine was built behind it"),
    Claim(START, "MindSpeed core_r0.16.0 is applied to megatron-core 0.16.1 without "
          "megatron.training", _E, _FAMILIES + "test_modules_are_the_ones_asked_for", True),
    Claim(START, "wrong orders of import are refused", _E,
          _BOOT + "test_megatron_before_the_adaptor_is_refused"),
    Claim(START, "patches that are not in force end the start", _E,
          _BOOT + "test_patches_that_are_not_in_force_are_found"),
    Claim(START, "expandable segments are taken out of the environment; a user's HCCL timeouts "
          "stay", _E, _BOOT + "test_the_adaptor_changes_nothing_for_others"),
    Claim(START, "the doctor: versions, CANN, driver, HCCL's timeouts and ports, devices, board of "
          "vllm-ascend's build, each with its fix", _U,
          limits="tested against made-up facts (tests/unit/test_doctor.py); where CANN, driver and "
          "npu-smi tell their versions was read in documentation"),
    Claim(START, "`--profile` records and analyses a window of steps with torch_npu's profiler; "
          "the trace has our phases and operators", _E,
          "tests/ascend/test_profiler.py::test_a_window_of_steps_is_recorded_and_analysed",
          limits="the framework's half; what CANN records of a device, and msprof, which reads it, "
          "are not there. Parameters of 2.10.0.post4 by signature"),
    Claim(START, "HCCL buffer sizes per group (`--hccl-group-buffer`)", _E,
          _BOOT + "test_hccl_buffers_are_of_the_group",
          limits="the options are built; no communicator is"),
    Claim(START, "`--npu-deterministic`: the environment is set before torch and torch_npu load, "
          "kernels that vary are refused, the start of a run says what is in force", _E,
          _BOOT + "test_the_adaptor_changes_nothing_for_others",
          limits="equal bits need a device"),
    Claim(START, "memory is counted by the driver, what torch's allocator does not know included",
          _E, _EMULATOR + "test_the_platform_sees_what_torch_does_not_count"),
    Claim(TRAINER, "forward, backward and updates of two tensor-parallel NPUs equal the CPU's, "
          "with and without the distributed optimizer", _E,
          "tests/ascend/test_training.py::test_two_npus_train_as_the_cpu",
          limits="kernels are the CPU's; collectives are gloo's"),
    Claim(TRAINER, "names and shapes of the built models of every family are those of the "
          "tables; gradients and updates equal the CPU's (megatron-core's modules)", _E,
          _FAMILIES + "test_family_trains_as_on_cpu"),
    Claim(TRAINER, "the same with MindSpeed's adaptor: local modules, those in Transformer "
          "Engine's place, and grouped GEMM", _E, _FAMILIES + "test_family_trains_as_on_cpu",
          True),
    Claim(TRAINER, "attention of packed rows runs as `npu_fusion_attention`, through "
          "`scaled_dot_product_attention`", _E,
          _EMULATOR + "test_attention_of_torch_is_the_fused_one",
          limits="its speed, and rows of many short sequences, on a device"),
    Claim(TRAINER, "Transformer Engine's modules on CUDA: arguments, names, shapes and marks of "
          "every family", _S, "tests/distributed/test_transformer_engine.py::"
          "test_models_of_its_modules_compute_what_transformers_does",
          limits="megatron-core's real wrappers on a double of Transformer Engine 2.11; itself was "
          "never executed here, nor was anything on CUDA"),
    Claim(FEATURES, "`--use-fused-rmsnorm`, `--use-fused-swiglu`: always on with MindSpeed", _E,
          _FAMILIES + "test_family_trains_as_on_cpu", True),
    Claim(FEATURES, "`--moe-grouped-gemm`", _E, _FAMILIES + "test_family_trains_as_on_cpu", True),
    Claim(FEATURES, "`--moe-tp-extend-ep` as whole experts over more expert-parallel ranks; not "
          "MindSpeed's own layer", _E,
          _MOVEMENT + "test_two_npus_reshard_every_bit_and_exchange_samples"),
    Claim(FEATURES, "flags are translated to MindSpeed's arguments; what breaks RL is refused", _S,
          _FLAGS + "test_mindspeed_is_told_what_differs"),
    Claim(FEATURES, "`--swap-optimizer`, `--use-fused-rotary-pos-emb`, `--moe-permute-fusion`", _U,
          limits="passed on; the first two compile operators with CANN when first used (the second "
          "ran with a stand-in), the third needs Triton kernels of triton-ascend"),
    Claim(FEATURES, "bf16, distributed optimizer, grouped GEMM, fused attention, norms, activation "
          "and rotation, full recomputation, `--npu-deterministic` together, as a run gives them "
          "to the adaptor: every family is built, bit-identical there and back; gradients and one "
          "update differ from the CPU's in bf16 by no more than twice what those differ from fp32",
          _E, _FAMILIES + "test_family_trains_as_on_cpu", True,
          limits="eight models on one rank; tokens have given experts, because roundings send some "
          "elsewhere"),
    Claim(FEATURES, "`--reuse-fp32-param`, `--recompute-norm`, `--recompute-activation-function` "
          "are refused", _S, _FLAGS + "test_what_breaks_rl_is_refused_with_the_reason",
          limits="MindSpeed imports megatron.training for them"),
    Claim(FEATURES, "`--context-parallel-algo`", _U,
          limits="the trainer gathers keys and values, whatever is asked for; ring and Ulysses "
          "are not used"),
    Claim(MOVEMENT, "HF checkpoint to NPU and back is bit-identical, every family", _E,
          _FAMILIES + "test_checkpoint_to_npu_and_back_is_bit_identical"),
    Claim(MOVEMENT, "the same with MindSpeed's adaptor", _E,
          _FAMILIES + "test_checkpoint_to_npu_and_back_is_bit_identical", True),
    Claim(MOVEMENT, "reshard between two NPUs, experts transposed as vLLM-Ascend stores them, "
          "three syncs, by all-to-all-v and by single messages; samples move between them", _E,
          _MOVEMENT + "test_two_npus_reshard_every_bit_and_exchange_samples",
          limits="gloo instead of HCCL: no timing, no deadlock, no memory of collectives"),
    Claim(MOVEMENT, "parameters, gradients, optimizer and reference leave the device and come "
          "back; the driver's free memory shows it; training goes on to the bit", _E,
          _MOVEMENT + "test_memory_leaves_the_npu_and_comes_back",
          limits="the test drives `Sharing`, which moves the groups, not the phase machine; "
          "segments are not expandable; the engine's pool is not there"),
    Claim(ENGINE, "vLLM-Ascend 0.23.0: after three cycles of sleep, wake and sync weights are "
          "equal, every expert was turned once, nothing moved; dense, experts, latent", _E,
          _WEIGHTS + "test_three_cycles_of_its_own_classes",
          limits="its own expert method, worker wake-up, allocator bookkeeping and latent "
          "attention; virtual memory is emulated, no engine was built, nothing was generated"),
    Claim(ENGINE, "models that vLLM-Ascend 0.23.0 builds itself have the names, shapes and types "
          "of the tables, eight models of all families", _E,
          "tests/ascend/test_built_models.py::test_names_and_shapes_are_those_of_the_table",
          limits="one rank, before processing; not through its worker"),
    Claim(ENGINE, "the pool of sleep mode leaves and comes back as a whole or not at all, whatever "
          "fails; weights are not copied to the host", _S,
          "tests/unit/test_ascend_memory.py::test_an_error_before_any_line_changes_nothing",
          limits="a pool on host memory; errors inside CANN end the process"),
    Claim(ENGINE, "three cycles for 0.11, 0.13, 0.18 and the main branch", _S,
          _ENGINE + "test_three_cycles_of_sleep_wake_and_sync",
          limits="fakes that do what the sources of the version say"),
    Claim(ENGINE, "our flags in the keys of 0.9.1, 0.11, 0.13, 0.18, 0.23 and main; others are "
          "refused with a way out", _S, _VERSIONS + "test_every_key_is_read_by_the_version",
          limits="the sources read the key; what it does was not run"),
    Claim(ENGINE, "weights stay ND (key and variable), no CPU binding, sleep mode, size of the "
          "cache in the version's terms", _S, _ENGINE + "test_the_engine_is_built_for_updates",
          limits="the arguments; no engine was built"),
    Claim(ENGINE, "models with sparse attention (SFA, DSA) are refused", _S,
          _REFUSED + "test_every_kind_of_sparse_attention_is_refused"),
    Claim(ENGINE, "one packed reduction per decode step gives what 0.23.0's own function gives", _E,
          _WEIGHTS + "test_the_packed_reduction_says_what_its_own_says",
          limits="its function alone; whole steps run on CPU with four ranks "
          "(tests/distributed/test_step_sync.py)"),
    Claim(ENGINE, "`--rl-routing-replay rollout` is refused: vLLM-Ascend's own record of its "
          "experts was never read here", _S,
          "tests/unit/test_routed_experts.py::test_an_engine_that_does_not_tell_is_refused"),
    Claim(ENGINE, "every name and argument that we use of torch_npu, vLLM, vLLM-Ascend, "
          "megatron-core and MindSpeed is there in the pinned version", _S,
          _API + "test_every_use_of_ours_is_in_the_snapshot",
          limits="names of compiled modules are not read, arguments of `acl.rt.memcpy` are not; "
          "attributes of objects as far as a run on CPU reaches them, those of vLLM-Ascend's "
          "objects by hand"),
    Claim(ENGINE, "expandable segments on while training and off while the engine has its weights",
          _E, _EMULATOR + "test_expandable_segments_are_switched_in_a_running_process",
          limits="torch_npu's switch and allocator; when we switch: on fakes "
          "(tests/unit/test_ascend_engine.py); camem's mappings are not there"),
    Claim(ENGINE, "graph modes, capture sizes, multi-stream, NZ cache, EPLB map", _U,
          limits="keys are checked (above); none was run"),
)  # fmt: skip


def table() -> str:
    """The claims by area, and how many have which grade."""
    counts = Counter(claim.grade for claim in CLAIMS)
    total = ", ".join(f"{grade.value} {counts[grade]}" for grade in Grade)
    lines = [f"Claims: {total}.", "", "| claim | grade | evidence | limits |", "|---|---|---|---|"]
    area = ""
    for claim in CLAIMS:
        if claim.area != area:
            area = claim.area
            lines.append(f"| **{area}** | | | |")
        evidence = f"`{claim.evidence}`" if claim.evidence else ""
        if claim.with_mindspeed:
            evidence += " with `MINDSPEED_PATH`"
        lines.append(f"| {claim.what} | {claim.grade.value} | {evidence} | {claim.limits} |")
    return "\n".join(lines) + "\n"


def document(text: str) -> str:
    """A document with its table replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


def main() -> None:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail when it is out of date")
    arguments = parser.parse_args()
    text = TARGET.read_text()
    if not arguments.check:
        TARGET.write_text(document(text))
    elif document(text) != text:
        sys.exit(f"{TARGET} is out of date: run python tools/ascend_grades.py")


if __name__ == "__main__":
    main()
