"""Which cases run in which training layout."""

from __future__ import annotations

from dataclasses import dataclass

from support.tiers import slow_but
from support.training_worlds import Case

_SMALL_PADDING = ("--make-vocab-size-divisible-by", "8")


def _flags(
    *, micro_batch: int = 2, tokens: int = 0, extra: tuple[str, ...] = ()
) -> tuple[str, ...]:
    size = ("--max-tokens-per-micro-batch", str(tokens))  # 0: so many samples, however long
    return ("--micro-batch-size", str(micro_batch), *size, *_SMALL_PADDING, *extra)


# Everything else is compared with this case on one rank: one micro-batch, no split of any kind.
REFERENCE = {
    loss: Case(f"{loss}-reference", _flags(micro_batch=100), loss)
    for loss in ("grpo", "on-policy", "sft")
}
SMALL = {
    loss: Case(f"{loss}-mbs2", _flags(micro_batch=2), loss) for loss in ("grpo", "on-policy", "sft")
}
BY_ONE = Case("grpo-mbs1", _flags(micro_batch=1))
BY_EIGHT = Case("grpo-mbs8", _flags(micro_batch=8))
BY_TOKENS = Case("grpo-tokens", _flags(tokens=33))
COLD = Case("grpo-cold", _flags(extra=("--rl-default-temperature", "0.7")))
BF16 = Case("sft-bf16", _flags(extra=("--bf16",)), "sft", num_steps=1)
RATE = ("--lr", "2e-4")
STEPS = Case("grpo-steps", _flags(extra=RATE), num_steps=3)
SHARDED_STEPS = Case(
    "grpo-sharded-steps", _flags(extra=(*RATE, "--use-distributed-optimizer")), num_steps=3
)
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform",
        "--recompute-num-layers", "1")  # fmt: skip
RECOMPUTED = Case("grpo-recomputed", _flags(extra=(*RATE, *FULL)), num_steps=3)
SEQUENCE = ("--sequence-parallel",)
SEQUENCE_PARALLEL = Case("grpo-sequence-parallel", _flags(extra=SEQUENCE))
SEQUENCE_PARALLEL_TOKENS = Case("grpo-sequence-parallel-tokens", _flags(tokens=33, extra=SEQUENCE))
# 307 ids in 512 rows per rank: every rank but the first holds padding alone
PADDING_RANK = Case(
    "grpo-padding-rank",
    ("--micro-batch-size", "2", "--make-vocab-size-divisible-by", "512"),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """A training layout.

    Attributes:
        num_ranks: size of the world.
        flags: the layout's flags.
        cases: what runs in it.
        tied: whether the model with tied embeddings runs too.
    """

    num_ranks: int
    flags: tuple[str, ...]
    cases: tuple[Case, ...]
    tied: bool = False


def _parallel(tp: int, pp: int) -> tuple[str, ...]:
    return (
        *("--tensor-model-parallel-size", str(tp)),
        *("--pipeline-model-parallel-size", str(pp)),
    )


LAYOUTS = {
    "tp1": Layout(
        1,
        _parallel(1, 1),
        (
            *REFERENCE.values(),
            *SMALL.values(),
            *(BY_ONE, BY_EIGHT, BY_TOKENS, COLD, BF16, STEPS, RECOMPUTED),
        ),
        tied=True,
    ),
    "dp2": Layout(
        2,
        _parallel(1, 1),
        (*SMALL.values(), BY_ONE, BY_TOKENS, STEPS, SHARDED_STEPS),
    ),
    "pp2": Layout(2, _parallel(1, 2), (*SMALL.values(), BY_EIGHT, COLD), tied=True),
    "pp4": Layout(4, _parallel(1, 4), (*SMALL.values(), BY_ONE, BY_TOKENS)),
    "tp2": Layout(
        2,
        _parallel(2, 1),
        (
            *SMALL.values(),
            *(COLD, SEQUENCE_PARALLEL, SEQUENCE_PARALLEL_TOKENS, PADDING_RANK),
        ),
        tied=True,
    ),
    "tp2-pp2": Layout(
        4,
        _parallel(2, 2),
        (*SMALL.values(), COLD, SEQUENCE_PARALLEL, BF16, STEPS, RECOMPUTED, SHARDED_STEPS),
    ),
}


def cases_of(layout: str, tied_model: str) -> tuple[Case, ...]:
    """The cases of a layout, those with tied embeddings last."""
    tied = Case("on-policy-tied", _flags(), "on-policy", model=tied_model)
    return (*LAYOUTS[layout].cases, *((tied,) if LAYOUTS[layout].tied else ()))


# As parameters of a test: these in every run, the others in turn.
LAYOUT_PARAMETERS = slow_but(LAYOUTS, ("tp1", "tp2", "dp2", "tp2-pp2"))
