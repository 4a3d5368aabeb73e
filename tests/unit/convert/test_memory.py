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
    """There and back with two workers; layers of one size, twice as many of them.

    Blocks are to the tensors what they are in large models, where the largest have 250 MB and more.
    """
    monkeypatch.setattr(source, "BLOCK_BYTES", LARGEST_BYTES // 8)
    tiny = write_model("qwen3", tmp_path / "tiny")

    def there_and_back(hf: Path, folder: Path) -> None:
        hf_to_mg(hf, folder / "mg", [*TP2, "--workers", "2"])
        mg_to_hf(folder / "mg", hf, folder / "back", "--workers", "2")

    peaks = {}
    for layers in (2, 4):
        hf, folder = tmp_path / f"hf{layers}", tmp_path / f"out{layers}"
        write_model("qwen3", hf, num_hidden_layers=layers, **SIZES)
        first = partial(there_and_back, tiny, tmp_path / f"tiny{layers}")
        peaks[layers] = peak_of(partial(there_and_back, hf, folder), first)
        assert_equal(hf_tensors(folder / "back"), hf_tensors(hf))
    size = 2 * LARGEST_BYTES + 4 * LAYER_BYTES
    assert size > 2 * BOUND_BYTES, "the bound says nothing about this model"
    assert max(peaks.values()) < BOUND_BYTES, peaks
    assert peaks[4] < peaks[2] + LARGEST_BYTES, f"two more layers have 12 MB: {peaks}"
