"""Flags and files of pretraining, checked before anything heavy starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.indexed_corpus import write_corpus

from mindspeed_rl.config import IndexedDataConfig, PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.arguments import parse
from mindspeed_rl.config.supervised import Blend, check_indexed_data, data_bytes, parse_blend
from mindspeed_rl.pretrain import refuse_other_data


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("a",), Blend(("a",), None)),
        (("a", "b"), Blend(("a", "b"), None)),
        (("30", "a", "0.7", "b"), Blend(("a", "b"), (30.0, 0.7))),
        (("1", "2", "3"), Blend(("1", "2", "3"), None)),
    ],
)
def test_blends_are_read_as_megatron_does(given: tuple[str, ...], expected: Blend) -> None:
    from megatron.core.datasets.utils import get_blend_from_list

    assert parse_blend(given) == expected
    prefixes, weights = get_blend_from_list(list(given))
    assert prefixes == list(expected.prefixes)
    assert weights == (None if expected.weights is None else list(expected.weights))


@pytest.mark.parametrize("given", [("30", "a", "b", "c"), ("0", "a"), ("-1", "a", "2", "b")])
def test_weights_must_be_positive_numbers(given: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=rf"--data-path {' '.join(given)}: must be prefixes only"):
        parse_blend(given)


def cut_tokens(prefix: Path) -> None:
    file = Path(f"{prefix}.bin")
    file.write_bytes(file.read_bytes()[:-2])


def cut_index(prefix: Path) -> None:
    file = Path(f"{prefix}.idx")
    file.write_bytes(file.read_bytes()[:-8])


def other_index(prefix: Path) -> None:
    Path(f"{prefix}.idx").write_text('{"index": 1}' * 9)


def floats(prefix: Path) -> None:
    file = Path(f"{prefix}.idx")
    content = bytearray(file.read_bytes())
    content[17] = 7
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda prefix: Path(f"{prefix}.bin").unlink(), r"corpus\.bin is missing; give the path"),
        (lambda prefix: Path(f"{prefix}.idx").unlink(), r"corpus\.idx is missing; give the path"),
        (cut_tokens, r"corpus\.bin has \d+ bytes, its index implies \d+; copy it again"),
        (cut_index, r"corpus\.idx has \d+ bytes, its header implies \d+; copy it again"),
        (other_index, r"corpus\.idx is no index of Megatron's datasets"),
        (floats, r"corpus\.idx has 3 sequences of element type 7; needed: at least one, of integ"),
    ],
)
def test_broken_datasets_are_told(tmp_path: Path, spoil: Callable[[Path], None], told: str) -> None:
    prefix = tmp_path / "corpus"
    documents = write_corpus(prefix, 99, 3, seed=0)
    assert data_bytes(str(prefix)) == 2 * sum(map(len, documents))
    config = IndexedDataConfig(data_path=(str(prefix),))
    check_indexed_data(config, 8)
    spoil(prefix)
    with pytest.raises(ValueError, match=rf"--data-path .*corpus: .*{told}"):
        check_indexed_data(config, 8)


@pytest.mark.parametrize(
    ("config", "seq_length", "told"),
    [
        (IndexedDataConfig(), 8, r"--data-path is required with --stage pretrain"),
        (IndexedDataConfig(("a",)), 0, r"--seq-length is required with --stage pretrain"),
        (IndexedDataConfig(("a",), split="0,1"), 8, r"--split 0,1: must be up to three shares"),
        (IndexedDataConfig(("a",), split="9,1,1,1"), 8, r"--split 9,1,1,1: must be up to three"),
        (IndexedDataConfig(("a",), split="x"), 8, r"--split x: must be up to three shares"),
    ],
)
def test_flags_of_pretraining(config: IndexedDataConfig, seq_length: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_indexed_data(config, seq_length)


SCRIPT = "--data-path 1 a 2 b --split 100,0,0 --data-cache-path c --num-workers 2"


def test_a_pretraining_script_means_the_same_to_both_entries() -> None:
    indexed = parse(
        PretrainRunConfig, [*SCRIPT.split(), "--stage", "pretrain"], "test"
    ).config.indexed
    assert indexed == IndexedDataConfig(("1", "a", "2", "b"), "100,0,0", "c")
    ignored = parse(RLRunConfig, SCRIPT.split(), "test").ignored
    assert "--data-path 1 a 2 b" in ignored and "--data-cache-path c" in ignored


@pytest.mark.parametrize(
    "flags",
    ["--eod-mask-loss", "--reset-position-ids", "--fim-data", "--dataloader-type cyclic",
     "--train-data-path a b"],
)  # fmt: skip
def test_flags_that_make_it_another_training_are_refused(flags: str) -> None:
    ignored = parse(PretrainRunConfig, f"{SCRIPT} {flags}".split(), "test").ignored
    with pytest.raises(ValueError, match=rf"{flags}: not available with --stage pretrain"):
        refuse_other_data(ignored)
    refuse_other_data(("--dataloader-type single", "--num-workers 2"))
