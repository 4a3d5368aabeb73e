"""How far log-probs of trainer and engine may be apart where both compute with the same weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AgreementBounds:
    """Bounds of the mean |log p(trainer) - log p(engine)| over sampled tokens, in nats.

    Attributes:
        expected: Rounding explains a mean up to here; a run warns above it.
        limit: A run ends above it.
        unlike: In which precisions trainer and engine compute where these differ; empty where they
            are the same.
    """

    expected: float
    limit: float
    unlike: str = ""


# docs/mismatch.md has the sources. A run ends at ten times what is expected in fp32, and at four
# times in bf16.
FP32 = AgreementBounds(1e-4, 1e-3)
BF16_DENSE = AgreementBounds(0.05, 0.2)
BF16_LATENT = AgreementBounds(0.1, 0.4)
BF16_EXPERTS = AgreementBounds(0.15, 0.6)


def unlike_precisions(*, trainer_bf16: bool, engine_bf16: bool) -> str:
    """Return in which precisions trainer and engine compute; empty if they are the same."""
    if trainer_bf16 == engine_bf16:
        return ""
    trainer, engine = ("bf16" if bf16 else "fp32" for bf16 in (trainer_bf16, engine_bf16))
    return f"the trainer computes in {trainer} and the engine in {engine}"


def agreement_bounds(
    *,
    bf16: bool,
    experts: bool,
    latent_attention: bool,
    limit: float | None = None,
    unlike: str = "",
) -> AgreementBounds:
    """Return the bounds of a run.

    Args:
        bf16: Whether trainer or engine computes in bfloat16.
        experts: Whether the model has experts.
        latent_attention: Whether it has latent attention.
        limit: ``--rl-sync-check-tol``; ``None``: the one of the precision and the model.
        unlike: Result of :func:`unlike_precisions`.
    """
    found = FP32
    if bf16:
        found = BF16_EXPERTS if experts else BF16_LATENT if latent_attention else BF16_DENSE
    if limit is None:
        return AgreementBounds(found.expected, found.limit, unlike)
    return AgreementBounds(min(found.expected, limit), limit, unlike)
