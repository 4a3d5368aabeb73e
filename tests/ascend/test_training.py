"""The trainer on emulated NPUs gives what it gives on the CPU: gradients, metrics, updates.

Without MindSpeed through torch_npu's stand-in for CUDA, with it through its adaptor.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ascend.npu_ranks import WITH_AND_WITHOUT, run_npu_ranks
from support.training_worlds import Case, make_samples, relative_errors, train_world, with_logprobs

if TYPE_CHECKING:
    from support.training_worlds import CaseResult

pytestmark = pytest.mark.ascend_emul

FLAGS = ("--micro-batch-size", "2", "--make-vocab-size-divisible-by", "8", "--lr", "2e-4")
CASES = (
    Case("grpo-steps", FLAGS, num_steps=2),
    Case("sft-sharded", (*FLAGS, "--use-distributed-optimizer"), "sft", num_steps=2),
)
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce")
# What two ranks share -> the layout, and what is trained in it.
LAYOUTS = {
    "layers": (("--tensor-model-parallel-size", "2"), CASES),
    "batches": ((), (Case("overlapped", (*FLAGS, *SHARDED), num_steps=2),)),
}
# The same kernels run on the same numbers, but for attention: torch_npu sends it to its fused
# operator, which the emulator computes one sequence at a time. Measured: 1.9e-6.
TOLERANCE = 1e-5


@pytest.mark.parametrize("shared", LAYOUTS)
@pytest.mark.parametrize("features", WITH_AND_WITHOUT)
def test_two_npus_train_as_the_cpu(
    features: Any, shared: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Two updates, with and without the distributed optimizer and overlapped reductions."""
    import torch

    layout, cases = LAYOUTS[shared]
    samples = make_samples(307)
    near = [torch.full((s.length - s.num_prompt_tokens,), -5.7) for s in samples]
    args = (layout, cases, str(tiny_model), with_logprobs(samples, near))
    results = []
    for platform in ("npu", "cpu"):
        ranks = run_npu_ranks(
            train_world, 2, work_dir=tmp_path / platform, args=args, platform=platform,
            features=features if platform == "npu" else None,
        )  # fmt: skip
        results.append(ranks[0])
    found, expected = results
    assert found.num_megatron_modules > 50
    for case in cases:
        assert_equal_runs(found.cases[case.name], expected.cases[case.name])


def assert_equal_runs(found: CaseResult, expected: CaseResult) -> None:
    assert len(found.gradients) == 51 and len(found.weights) == 51
    for name in ("gradients", "weights"):
        errors = relative_errors(getattr(found, name), getattr(expected, name))
        worst = max(errors, key=lambda key: errors[key])
        assert errors[worst] <= TOLERANCE, (name, worst, errors[worst])
    assert found.metrics == pytest.approx(expected.metrics, rel=TOLERANCE, abs=TOLERANCE)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=TOLERANCE)
    assert min(expected.grad_norms) > 0
