"""Flags and files of pretraining, checked before anything heavy starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.indexed_corpus import write_corpus

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import IndexedDataConfig, PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.supervised import Blend, check_indexed_data, data_bytes, parse_blend
from mindspeed_rl.core.errors import UsageError
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
    with pytest.raises(UsageError, match=f"--data-path {' '.join(given)}"):
        parse_blend(given)


def floating(content: bytes) -> bytes:
    """Another element type."""
    return content[:17] + b"\7" + content[18:]


@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        ("corpus.bin", lambda content: None),
        ("corpus.idx", lambda content: None),
        ("corpus.bin", lambda content: content[:-2]),
        ("corpus.idx", lambda content: content[:-8]),
        ("corpus.idx", lambda content: b'{"index": 1}' * 9),
        ("corpus.idx", floating),
    ],
)
def test_broken_datasets_are_told(
    tmp_path: Path, file: str, spoil: Callable[[bytes], bytes | None]
) -> None:
    prefix, place = tmp_path / "corpus", tmp_path / file
    documents = write_corpus(prefix, 99, 3, seed=0)
    assert data_bytes(str(prefix)) == 2 * sum(map(len, documents))
    config = IndexedDataConfig(data_path=(str(prefix),))
    check_indexed_data(config, 8)
    if (content := spoil(place.read_bytes())) is None:
        place.unlink()
    else:
        place.write_bytes(content)
    with pytest.raises(UsageError, match=f"--data-path .*{re.escape(file)}"):
        check_indexed_data(config, 8)


@pytest.mark.parametrize(
    ("config", "seq_length", "flag"),
    [
        (IndexedDataConfig(), 8, "--data-path"),
        (IndexedDataConfig(("a",)), 0, "--seq-length"),
        *((IndexedDataConfig(("a",), s), 8, f"--split {s}") for s in ("0,1", "9,1,1,1", "x")),
    ],
)
def test_flags_of_pretraining(config: IndexedDataConfig, seq_length: int, flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
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
    with pytest.raises(UsageError, match=flags):
        refuse_other_data(ignored)
    refuse_other_data(("--dataloader-type single", "--num-workers 2"))
