"""Rates and utilisation against numbers that were worked out by hand."""

from __future__ import annotations

import pytest

from mindspeed_rl.metrics.throughput import Devices, TokenCount, token_rates, utilisation
from mindspeed_rl.platforms.device_models import device_model

TOKENS = TokenCount(prompt=600, response=1800)


def test_a_card_of_two_dies_has_twice_the_rate_of_a_die() -> None:
    """2400 tokens in 4 s on 8 dies, which are 4 cards."""
    found = token_rates("rollout_", TOKENS, 4.0, Devices(count=8, per_card=2))
    assert found == {
        "throughput/rollout_tokens_per_s": 450.0,
        "throughput/rollout_tokens_per_s_per_device": 56.25,
        "throughput/rollout_tokens_per_s_per_card": 112.5,
        "throughput/rollout_all_tokens_per_s": 600.0,
        "throughput/rollout_all_tokens_per_s_per_device": 75.0,
        "throughput/rollout_all_tokens_per_s_per_card": 150.0,
    }


def test_the_step_has_the_plain_names_and_no_cards_where_a_card_is_a_device() -> None:
    found = token_rates("", TOKENS, 4.0, Devices(count=8))
    assert set(found) == {
        f"throughput/{kind}tokens_per_s{unit}"
        for kind in ("", "all_")
        for unit in ("", "_per_device")
    }
    assert found["throughput/tokens_per_s"] == 450.0


def test_utilisation_is_a_share_of_the_peak_of_all_devices() -> None:
    """6e14 operations in 2 s on 3 devices of 250 TFLOP/s."""
    found = utilisation("update_", 6e14, 2.0, Devices(count=3, peak_tflops=250.0))
    assert found == {
        "throughput/update_tflops_per_device": 100.0,
        "throughput/update_mfu": pytest.approx(0.4),
    }


def test_without_a_peak_there_is_no_utilisation_and_without_seconds_no_rate() -> None:
    found = utilisation("update_", 6e14, 2.0, Devices(count=3))
    assert found == {"throughput/update_tflops_per_device": 100.0}
    assert not token_rates("", TOKENS, 0.0, Devices(1))
    assert not utilisation("", 6e14, 0.0, Devices(1, peak_tflops=1.0))


@pytest.mark.parametrize(
    ("name", "peak", "per_card"),
    [
        ("Ascend910B3", 313.0, 1),
        ("Ascend910_9382", 376.0, 2),
        ("Ascend910_9391", None, 2),
        ("NVIDIA H100 80GB HBM3", 989.0, 1),
        ("NVIDIA H100 PCIe", 756.0, 1),
        ("NVIDIA A100-SXM4-80GB", 312.0, 1),
        ("NVIDIA H20", 148.0, 1),
        ("NVIDIA H200", 989.0, 1),
        ("cpu", None, 1),
    ],
)
def test_a_device_is_known_by_the_longest_name_that_fits(
    name: str, peak: float | None, per_card: int
) -> None:
    found = device_model(name)
    assert (found.peak_tflops, found.per_card) == (peak, per_card)
