"""The cache of sample indices: whatever is in it, nothing is executed when it is read."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.indexed_corpus import write_corpus

from mindspeed_rl.config.supervised import IndexedDataConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.trainer.indexed_data import IndexedSamples

VOCAB = 97


class Call:
    """Its pickle asks for a call that leaves a file."""

    def __init__(self, note: Path) -> None:
        self._note = str(note)

    def __reduce__(self) -> Any:
        return open, (self._note, "w")


def samples(folder: Path) -> IndexedSamples:
    config = IndexedDataConfig(data_path=(str(folder / "corpus"),), split="100,0,0")
    return IndexedSamples(config, seed=3, seq_length=16, num_samples=7, vocab_size=VOCAB)


def array_of_objects(call: Call) -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([call], dtype=object), allow_pickle=True)
    return content.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Indexed data, with the cache of an earlier start."""
    write_corpus(tmp_path / "corpus", VOCAB, 60, seed=5)
    samples(tmp_path)
    return tmp_path


def test_rows_of_a_cache_are_those_of_the_first_start(folder: Path) -> None:
    rows = [[s.token_ids.tolist() for s in samples(folder).next(7).samples] for _ in range(2)]
    assert rows[0] == rows[1] and len(rows[0]) == 7


@pytest.mark.parametrize("name", ["document_index", "sample_index", "shuffle_index"])
@pytest.mark.parametrize("kind", ["pickle", "objects", "cut", "empty"])
def test_an_index_that_is_no_array_is_refused_and_not_executed(
    folder: Path, name: str, kind: str
) -> None:
    (index,) = folder.rglob(f"*{name}.npy")
    note = folder / "executed"
    content = {
        "pickle": pickle.dumps(Call(note)),
        "objects": array_of_objects(Call(note)),
        "cut": index.read_bytes()[:70],
        "empty": b"",
    }[kind]
    index.write_bytes(content)
    with pytest.raises(UsageError, match=f"--data-cache-path: .*{name}.npy is no index") as caught:
        samples(folder)
    assert "\n" not in str(caught.value) and not note.exists()
    if kind == "pickle":
        np.load(index, allow_pickle=True)
        assert note.exists(), "the call works, so that the test can fail"
    assert np.load.__module__ != "mindspeed_rl.trainer.indexed_data", "the function is back"
