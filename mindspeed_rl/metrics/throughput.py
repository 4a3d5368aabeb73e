"""Throughput of a step: tokens per second by part, device and card, and FLOPs utilisation. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config import TrainingRunConfig
from mindspeed_rl.metrics.names import TOKENS_PER_S
from mindspeed_rl.platforms.device_models import device_model


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that a run computes on.

    Attributes:
        count: Number of devices, one per rank.
        per_card: Devices of one card.
        peak_tflops: Peak of one device in the precision of training, in 1e12 operations per second;
            ``None``: not known.
    """

    count: int
    per_card: int = 1
    peak_tflops: float | None = None


def devices_of(config: TrainingRunConfig, world: int, device_name: str) -> Devices:
    """Return the devices of a run.

    The table of peaks is for bfloat16, so a run in fp32 has none but ``--device-peak-tflops``.
    """
    model = device_model(device_name)
    known = model.peak_tflops if config.train.bf16 else None
    return Devices(world, model.per_card, config.device.device_peak_tflops or known)


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Real tokens, without padding, of prompts and of responses."""

    prompt: int
    response: int

    @property
    def total(self) -> int:
        return self.prompt + self.response


def token_rates(
    part: str, tokens: TokenCount, seconds: float, devices: Devices
) -> dict[str, float]:
    """Return tokens per second, counted as response tokens and as prompt and response tokens.

    Args:
        part: Beginning of the names: empty for the whole step, ``rollout_`` or ``update_``.
        tokens: Tokens of all ranks together.
        seconds: Wall time in which they were worked on; 0: it was not measured, nothing is
            returned.
        devices: What the tokens are divided by: each rate is also given per device, and per card
            where a card has several devices.
    """
    if not seconds:
        return {}
    group, _, rate = TOKENS_PER_S.partition("/")
    values = {}
    for kind, number in (("", tokens.response), ("all_", tokens.total)):
        name = f"{group}/{part}{kind}{rate}"
        values[name] = number / seconds
        values[f"{name}_per_device"] = number / seconds / devices.count
        if devices.per_card > 1:
            values[f"{name}_per_card"] = number / seconds / devices.count * devices.per_card
    return values


def utilisation(part: str, flops: float, seconds: float, devices: Devices) -> dict[str, float]:
    """Return TFLOP/s per device and, where the peak is known, its share of the peak (MFU).

    Model FLOPs utilisation as Chowdhery et al. 2022 define it (arXiv:2204.02311, appendix B):
    neither recomputation nor padding counts.

    Args:
        part: Beginning of the names.
        flops: Operations of forward and backward passes over real tokens, on all ranks together.
        seconds: Wall time; 0: it was not measured, nothing is returned.
        devices: Devices that shared the work.
    """
    if not seconds:
        return {}
    tflops = flops / seconds / devices.count / 1e12
    values = {f"throughput/{part}tflops_per_device": tflops}
    if devices.peak_tflops:
        values[f"throughput/{part}mfu"] = tflops / devices.peak_tflops
    return values
