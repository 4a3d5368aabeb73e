"""Rotary position embeddings of a config, in either spelling, and their frequencies.

transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 ``rope_parameters``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.config_values import read

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The base frequency and the scaling of rotary embeddings.

    Attributes:
        theta: Base of the frequencies.
        kind: One of ``KINDS``.
        factor: Factor by which the context is stretched.
        original_max_position: Context before stretching, in tokens; for llama3 and yarn.
        low_freq_factor: For llama3: rotations below which a frequency is stretched in full.
        high_freq_factor: For llama3: rotations above which a frequency stays unchanged.
        beta_fast: For yarn: rotations above which a frequency stays unchanged.
        beta_slow: For yarn: rotations below which a frequency is stretched in full.
        truncate: For yarn: whether the two borders are rounded outwards to whole channels.
        attention_factor: For yarn: factor of cosine and sine.
        softmax_mscale: For DeepSeek's yarn: the softmax scale is multiplied by the square of it.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    softmax_mscale: float = 1.0

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Angle per position of each pair of channels: ``head_dim / 2`` numbers, in radians.

        default: theta^(-2i/d) (Su et al. 2021, arXiv:2104.09864). linear: divided by the factor
        (Chen et al. 2023, arXiv:2306.15595). llama3: wave lengths above
        original / low_freq_factor are divided, those below original / high_freq_factor are not,
        with a linear blend between (Llama 3.1's reference code). yarn: a blend over channels
        (Peng et al. 2023, arXiv:2309.00071, section 3.2).
        """
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.kind == "linear":
            return [f / self.factor for f in plain]
        if self.kind == "llama3":
            return [self._llama3(f) for f in plain]
        if self.kind == "yarn":
            return self._yarn(plain, head_dim)
        return plain

    def _llama3(self, frequency: float) -> float:
        turns = self.original_max_position * frequency / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = min(1.0, max(0.0, keep))
        return keep * frequency + (1 - keep) * frequency / self.factor

    def _yarn(self, plain: list[float], head_dim: int) -> list[float]:
        def channel(turns: float) -> float:
            length = self.original_max_position / (turns * 2 * math.pi)
            return head_dim * math.log(length) / (2 * math.log(self.theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        span = max(high - low, 0.001)
        result = []
        for i, frequency in enumerate(plain):
            stretched = min(1.0, max(0.0, (i - low) / span))
            result.append(frequency * (1 - stretched) + frequency / self.factor * stretched)
        return result


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature: 0.1 mscale ln(factor) + 1 (arXiv:2309.00071, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling of a config, in either spelling; a null means the same as no key."""
    both = [read(config, dict, key, default={}) for key in ("rope_scaling", "rope_parameters")]
    return {k: v for scaling in both for k, v in scaling.items() if v is not None}


def rope_of(config: Mapping[str, Any]) -> RopeSpec:
    """Read the rotary embedding of a config.

    Raises:
        KeyError: The base of the frequencies is missing.
        UsageError: A kind is not computed, or a number of its scaling is missing.
    """
    scaling = rope_parameters(config)
    kind = read(scaling, str, "rope_type", "type", default="default")
    theta = read({**config, **scaling}, float, "rope_theta")
    if kind not in KINDS:
        raise UsageError(f"config.json: rope type {kind!r} is not supported; allowed: {KINDS}")
    partial = read({**config, **scaling}, float, "partial_rotary_factor", default=1.0)
    if partial != 1.0:
        raise UsageError(f"config.json: partial_rotary_factor {partial}; allowed: 1")
    if kind == "default":
        return RopeSpec(theta)
    try:
        return _scaled(kind, theta, scaling, config)
    except KeyError as error:
        raise UsageError(f"config.json: rope type {kind!r} lacks {error}") from error


def _scaled(
    kind: str, theta: float, scaling: Mapping[str, Any], config: Mapping[str, Any]
) -> RopeSpec:
    factor = read(scaling, float, "factor")
    if factor <= 0:
        raise UsageError(f"config.json: rope factor {factor}; must be positive")
    if kind == "linear":
        return RopeSpec(theta, kind, factor)
    longest = read(config, int, "max_position_embeddings")
    original = read(scaling, int, "original_max_position_embeddings", default=longest)
    if kind == "llama3":
        low, high = (read(scaling, float, f"{end}_freq_factor") for end in ("low", "high"))
        if high <= low:
            raise UsageError(
                f"config.json: high_freq_factor {high} must be above low_freq_factor {low}"
            )
        return RopeSpec(theta, kind, factor, original, low, high)
    mscale, all_dim = (
        read(scaling, float, key, default=0.0) for key in ("mscale", "mscale_all_dim")
    )
    attention = yarn_mscale(factor, 1.0)
    if mscale and all_dim:
        attention = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return RopeSpec(
        theta,
        kind,
        factor,
        original,
        beta_fast=read(scaling, float, "beta_fast", default=32.0),
        beta_slow=read(scaling, float, "beta_slow", default=1.0),
        truncate=read(scaling, bool, "truncate", default=True),
        attention_factor=read(scaling, float, "attention_factor", default=attention),
        softmax_mscale=yarn_mscale(factor, all_dim) if all_dim else 1.0,
    )
