"""What a conversion takes of the host, whatever the model's size."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from support.conversions import assert_equal, hf_tensors, hf_to_mg, mg_to_hf, write_model
from support.peak_memory import peak_of

from mindspeed_rl.convert import source

TP2 = ("--target-tensor-parallel-size", "2")
# tensors of up to 4 MB; a layer has 6 MB
SIZES = {"hidden_size": 256, "intermediate_size": 4096, "vocab_size": 8192}
LARGEST_BYTES = 2 * 8192 * 256
LAYER_BYTES = 2 * 3 * 4096 * 256
# two of the largest source tensors and one output shard, which TP2 halves
BOUND_BYTES = 2 * LARGEST_BYTES + LARGEST_BYTES // 2


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways, two workers; layers of one size, twice as many of them.

    Blocks are to the tensors what they are in large models, where the largest have 250 MB and more.
    """
    monkeypatch.setattr(source, "BLOCK_BYTES", LARGEST_BYTES // 8)
    tiny = write_model("qwen3", tmp_path / "tiny")
    hf_to_mg(tiny, tmp_path / "tiny-mg", TP2)
    workers = ("--workers", "2")

    def peaks_of(hf: Path, mg: Path, back: Path) -> tuple[int, int]:
        """There and back; each after the same with the tiny model."""
        few, fewer = tmp_path / f"{mg.name}-tiny", tmp_path / f"{back.name}-tiny"
        return (
            peak_of(
                partial(hf_to_mg, hf, mg, [*TP2, *workers]),
                partial(hf_to_mg, tiny, few, [*TP2, *workers]),
            ),
            peak_of(
                partial(mg_to_hf, mg, hf, back, *workers),
                partial(mg_to_hf, tmp_path / "tiny-mg", tiny, fewer, *workers),
            ),
        )

    peaks: dict[int, tuple[int, int]] = {}
    for layers in (2, 4):
        hf, mg, back = (tmp_path / f"{kind}{layers}" for kind in ("hf", "mg", "back"))
        write_model("qwen3", hf, num_hidden_layers=layers, **SIZES)
        peaks[layers] = peaks_of(hf, mg, back)
        if layers == 2:
            assert_equal(hf_tensors(back), hf_tensors(hf))
    size = 2 * LARGEST_BYTES + 4 * LAYER_BYTES
    assert size > 2 * BOUND_BYTES, "the bound says nothing about this model"
    for small, large in zip(peaks[2], peaks[4], strict=True):
        assert max(small, large) < BOUND_BYTES, peaks
        assert large < small + LARGEST_BYTES, f"two more layers have 12 MB: {peaks}"
