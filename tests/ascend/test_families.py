"""Every family on an emulated NPU: built as its table says, loaded to the bit, trained as on CPU.

With ``MINDSPEED_PATH`` the same through MindSpeed's real adaptor, with megatron-core's own modules
and with those that MindSpeed puts in Transformer Engine's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any

import pytest
from ascend.npu_ranks import needs_mindspeed, run_npu_ranks
from support.family_models import FAMILY_CASES, VOCAB, write_family_model
from support.training_worlds import relative_errors

if TYPE_CHECKING:
    from ascend.worlds import FamilyFacts

pytestmark = [pytest.mark.ascend_emul, pytest.mark.slow]


@dataclass(frozen=True)
class Way:
    """How the trainer is run.

    Attributes:
        platform: npu, or cpu for what the others are compared with.
        flags: of the trainer.
        features: of MindSpeed; ``None`` where its adaptor is not there.
        fused_norms: norms are inside the linear layers.
        grouped: experts are in one module.
        tolerance: of gradients, relative, measured; ``None``: see :func:`roundings`.
        twin: the way on CPU that it is compared with.
        given: tokens have experts of their own, whatever routers would choose: in bf16 they choose
            others for some tokens, whose gradients would then be those of other experts.
    """

    platform: str = "npu"
    flags: tuple[str, ...] = ()
    features: Mapping[str, Any] | None = field(default=None, hash=False)
    fused_norms: bool = False
    grouped: bool = False
    tolerance: float | None = 2e-5
    twin: str = "cpu"
    given: bool = False


BF16_ULP = 2.0**-8
ROUTER_BIAS = "e_score_correction_bias"
# What a run on NPUs has switched on, whole: as `npu_setup` gives it to the adaptor. Not
# --swap-optimizer, which test_checkpoint.py has, nor --moe-permute-fusion, which Triton does.
PRODUCTION = (
    *("--bf16", "--use-distributed-optimizer", "--moe-grouped-gemm"),
    *("--use-flash-attn", "--use-fused-rmsnorm", "--use-fused-swiglu"),
    *("--use-fused-rotary-pos-emb", "--npu-deterministic"),
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
# What published scripts pass, with those that the run goes on without.
SCRIPT = (
    *("--transformer-impl", "local", "--bf16", "--use-distributed-optimizer"),
    *("--use-flash-attn", "--use-fused-rmsnorm", "--use-fused-swiglu", "--moe-grouped-gemm"),
    *("--use-fused-rotary-pos-emb", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--reuse-fp32-param", "--swap-attention", "--recompute-activation-function"),
    *("--use-ascend-coc", "--moe-alltoall-overlap-comm", "--gemm-gradient-accumulation-fusion"),
    *("--recompute-granularity", "full", "--recompute-method", "block"),
    *("--recompute-num-layers", "1"),
)
WAYS = {
    "cpu": Way("cpu"),
    "cpu given": Way("cpu", given=True),
    "cpu bf16": Way("cpu", flags=("--bf16", "--use-distributed-optimizer"), given=True),
    "torch_npu": Way(),
    "mindspeed local": Way(flags=("--transformer-impl", "local"), features={}),
    "mindspeed": Way(features={"use_fused_rmsnorm": True}, fused_norms=True),
    "mindspeed grouped": Way(
        flags=("--moe-grouped-gemm",), features={"moe_grouped_gemm": True}, fused_norms=True,
        grouped=True,
    ),
    "mindspeed production": Way(
        flags=PRODUCTION, features={"flags": PRODUCTION}, fused_norms=True, grouped=True,
        tolerance=None, twin="cpu bf16", given=True,
    ),
    "mindspeed script": Way(
        flags=SCRIPT, features={"flags": SCRIPT}, tolerance=None, twin="cpu bf16", given=True
    ),
}  # fmt: skip
COMPARED = [
    pytest.param(way, marks=needs_mindspeed if "mindspeed" in way else ())
    for way in WAYS
    if not way.startswith("cpu")
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, FamilyFacts]]:
    """Name of a way -> facts of every family; each way runs once."""
    root = tmp_path_factory.mktemp("families")
    models = {n: str(write_family_model(c, root / n)) for n, c in FAMILY_CASES.items()}

    @cache
    def outcome(name: str) -> dict[str, FamilyFacts] | AssertionError:
        from ascend.worlds import family_world

        way = WAYS[name]
        try:
            results = run_npu_ranks(
                family_world, 1, work_dir=root / name.replace(" ", "-"),
                args=(models, VOCAB, way.flags, way.given), platform=way.platform,
                features=way.features,
            )  # fmt: skip
        except AssertionError as error:  # not tried once more for every model
            return error
        facts: dict[str, FamilyFacts] = results[0]
        return facts

    def run(name: str) -> dict[str, FamilyFacts]:
        found = outcome(name)
        if isinstance(found, AssertionError):
            raise found
        return found

    return run


def errors_of(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
    """Relative, of all that is trained: the bias of a router is not."""
    trained = [name for name in expected if ROUTER_BIAS not in name]
    assert found.keys() == expected.keys()
    errors = relative_errors(
        {name: found[name] for name in trained}, {name: expected[name] for name in trained}
    )
    assert all(map(isfinite, errors.values()))
    return errors


def roundings(found: Mapping[str, Any], exact: Mapping[str, Any]) -> dict[str, float]:
    """How far two right answers in bf16 may be apart, of what ``found`` is one; by tensor.

    Its own rounding is its distance from the answer in fp32; another order of the same operations
    may be as far off on the other side. No tensor is asked for more than bf16 can tell.
    """
    limits = {n: max(2 * error, BF16_ULP) for n, error in errors_of(found, exact).items()}
    assert max(limits.values()) < 0.125, "as good as no limit"
    return limits


def assert_within(errors: Mapping[str, float], limits: Mapping[str, float]) -> None:
    beyond = {name: (error, limits[name]) for name, error in errors.items() if error > limits[name]}
    assert not beyond, beyond


@pytest.mark.parametrize("way", COMPARED)
@pytest.mark.parametrize("model", FAMILY_CASES)
def test_checkpoint_to_npu_and_back_is_bit_identical(
    model: str, way: str, ran: Callable[[str], dict[str, FamilyFacts]]
) -> None:
    assert ran(way)[model].changed == []


@pytest.mark.parametrize("way", COMPARED)
@pytest.mark.parametrize("model", FAMILY_CASES)
def test_family_trains_as_on_cpu(
    model: str, way: str, ran: Callable[[str], dict[str, FamilyFacts]]
) -> None:
    found, expected = ran(way)[model].run, ran(WAYS[way].twin)[model].run
    gradients = errors_of(found.gradients, expected.gradients)
    weights = errors_of(found.weights, expected.weights)
    tolerance = WAYS[way].tolerance
    if tolerance is None:
        exact = ran("cpu given")[model].run
        of_gradients = roundings(expected.gradients, exact.gradients)
        of_weights, of_loss = roundings(expected.weights, exact.weights), BF16_ULP
    else:
        of_gradients = dict.fromkeys(gradients, tolerance)
        of_weights, of_loss = dict.fromkeys(weights, 5 * tolerance), tolerance / 2
    assert_within(gradients, of_gradients)
    assert_within(weights, of_weights)
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=of_loss)
    norm = max(of_gradients.values())  # relative to the whole, so no more than that of a part
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=norm)


@pytest.mark.parametrize("way", COMPARED)
@pytest.mark.parametrize("model", FAMILY_CASES)
def test_modules_are_the_ones_asked_for(
    model: str, way: str, ran: Callable[[str], dict[str, FamilyFacts]]
) -> None:
    """Their names and shapes were compared with the table when they were built."""
    facts = ran(way)[model]
    fused = [name for name in facts.names if name.endswith("layer_norm_weight")]
    assert bool(fused) == WAYS[way].fused_norms
    grouped = [name for name in facts.names if ".experts.linear_fc1.weight" in name]
    assert bool(grouped) == (WAYS[way].grouped and FAMILY_CASES[model].experts)
    assert facts.modules["self_attention.core_attention"] == "PackedSelfAttention"
