"""What a conversion takes of the host whatever the model's size, and the bar that it shows."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.conversions import assert_equal, hf_tensors, hf_to_mg, mg_to_hf, write_model

from mindspeed_rl.convert import command, run, source
from mindspeed_rl.convert.options import parse_options
from mindspeed_rl.platforms.host_memory import peak_bytes, reset_peak_bytes

TP2 = ("--target-tensor-parallel-size", "2")
# tensors of up to 4 MB; a layer has 6 MB
SIZES = {"hidden_size": 256, "intermediate_size": 4096, "vocab_size": 8192}
LARGEST_BYTES = 2 * 8192 * 256
LAYER_BYTES = 2 * 3 * 4096 * 256
# two of the largest source tensors and one output shard, which TP2 halves
BOUND_BYTES = 2 * LARGEST_BYTES + LARGEST_BYTES // 2


def peak_of(task: Callable[[], object], first: Callable[[], object]) -> int:
    """Bytes that a forked process takes for a task beyond what it has after ``first``.

    Pages of libraries are the child's own only when it has touched them.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            first()
            reset_peak_bytes()
            before = peak_bytes()
            task()
            os.write(writer, str(peak_bytes() - before).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    assert os.waitpid(child, 0)[1] == 0
    return int(text)


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


class Bar:
    """What tqdm was told."""

    def __init__(self, total: int, disable: bool | None, **_: object) -> None:
        self.total, self.disable = total, disable
        self.updates: list[int] = []

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, size: int) -> None:
        self.updates.append(size)


def test_a_bar_goes_from_what_was_written_before_to_all_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of tensors; those in finished files of an earlier attempt count."""
    bars: list[Bar] = []
    monkeypatch.setattr(command, "tqdm", lambda **flags: bars.append(Bar(**flags)) or bars[-1])
    model = write_model("deepseek", tmp_path / "model")
    argv = ["--load-dir", str(model), "--save-dir", str(tmp_path / "mg"), *TP2, "--workers", "1"]
    real = run._Writer._write_tensor

    def stopping(*args: Any) -> None:
        if len(bars[0].updates) == 90:
            raise OSError(28, "No space left on device")
        real(*args)

    with (
        mock.patch.object(run._Writer, "_write_tensor", stopping),
        pytest.raises(OSError, match="No space left"),
    ):
        command.run_conversion(parse_options(argv), lambda line: None)
    command.run_conversion(parse_options([*argv, "--no-progress"]), lambda line: None)
    first, second = bars
    assert not first.disable and second.disable
    assert first.updates[0] == 0 and 0 < sum(first.updates) < first.total == second.total
    assert 0 < second.updates[0] < sum(second.updates) == second.total
