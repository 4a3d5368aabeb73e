"""Reads rows of Megatron's indexed datasets in Megatron's order, through megatron.core.datasets.

These properties of Megatron are kept: blends and their weights, the split, rows that cross the
borders of documents (with attention, positions and loss across them), the shuffles by seed, several
epochs, the cache of sample indices. Its loss mask is not: every token of a row is trained on, even
if its id is the tokenizer's padding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from mindspeed_rl.config.supervised import IndexedDataConfig, data_bytes, parse_blend
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.data.batches import StepSamples

_HELPERS = "megatron.core.datasets.helpers_cpp"
_ORDER_CHUNK = 1 << 20
_STATE_KEYS = {"consumed_samples", "order"}


class _TokenIds:
    """The tokenizer interface of megatron.core.datasets. Without ``pad`` no token is masked."""

    eod = -2  # required, but used only by switches that are off here; -1 marks padding

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.unique_identifiers = {"vocab_size": vocab_size}


class IndexedSamples:
    """Rows of ``seq_length`` tokens with the loss on every token, including the one after the row.

    Construction is collective: the world. Rank 0 builds and stores the indices of samples; the
    others read them.

    Args:
        config: Selects the data.
        seed: Seed of the shuffles.
        seq_length: Number of tokens of a row.
        num_samples: Number of rows of the whole run; with several epochs the order depends on it.
        vocab_size: Upper limit of token ids, exclusive.

    Raises:
        UsageError: There is too little data, a rank does not see the indices, or megatron-core's
            helpers are missing.
    """

    def __init__(
        self,
        config: IndexedDataConfig,
        *,
        seed: int,
        seq_length: int,
        num_samples: int,
        vocab_size: int,
    ) -> None:
        if find_spec(_HELPERS) is None:
            raise UsageError(
                f"--data-path: megatron-core is installed without its compiled {_HELPERS}; "
                "install it from a wheel, or run make in its folder megatron/core/datasets"
            )
        self._seq_length, self._vocab_size = seq_length, vocab_size
        self._blend = parse_blend(config.data_path)
        self._split = config.split
        self._dataset = _build(config, seed, seq_length, num_samples, vocab_size)
        self._consumed = 0

    def next(self, count: int) -> StepSamples:
        """Return the next ``count`` rows, which are read from disk on access."""
        first, self._consumed = self._consumed, self._consumed + count
        rows = _Rows(self, range(first, self._consumed))
        return StepSamples(rows, [self._seq_length] * count, self._seq_length * count)

    def read(self, index: int, sample_id: int) -> TrainSample:
        """Read one row from disk.

        Raises:
            UsageError: A token id is outside the vocabulary.
        """
        row = self._dataset[index]
        tokens, after = row["tokens"], int(row["labels"][-1])
        low = min(int(tokens.min()), after)
        high = max(int(tokens.max()), after)
        if low < 0 or high >= self._vocab_size:
            raise UsageError(
                f"--data-path {' '.join(self._blend.prefixes)}: row {index} has ids from {low} to "
                f"{high}, the model's go to {self._vocab_size - 1}; tokenise the data with the "
                "tokenizer of --hf-checkpoint"
            )
        return TrainSample(sample_id, tokens, 1, token_after=after)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows that are done and a digest that identifies them."""
        return {"consumed_samples": self._consumed, "order": self._order(self._consumed)}

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_changed_data: bool = False
    ) -> None:
        """Continue after the rows that are done.

        Raises:
            UsageError: They are not the first rows of this run's order, and changed data is not
                allowed.
        """
        if set(state) != _STATE_KEYS:
            raise UsageError(
                f"the checkpoint's data state has the keys {sorted(state)}, expected "
                f"{sorted(_STATE_KEYS)}: it is of another --stage; resume with that one, or add "
                "--finetune to start its data from the beginning"
            )
        consumed = int(state["consumed_samples"])
        if not allow_changed_data and state["order"] != self._order(consumed):
            raise UsageError(
                f"--load: the first {consumed} rows of this run are not those that the checkpoint "
                "was trained on: --data-path, --split, --seq-length or --seed changed, or "
                "--train-iters x --global-batch-size did where the data is read more than once; "
                "resume with the same, or add --allow-changed-data to go on in the present order"
            )
        self._consumed = consumed

    def report(self) -> str:
        return (
            f"{' '.join(self._blend.prefixes)}: {len(self._dataset)} rows of {self._seq_length} "
            f"tokens from the first share of --split {self._split}"
        )

    def _order(self, count: int) -> str:
        """Return a digest of the data files and of the places where the first rows begin."""
        state = hashlib.blake2b(digest_size=16)
        sizes = [data_bytes(prefix) for prefix in self._blend.prefixes]
        state.update(repr((sizes, self._seq_length)).encode())
        for first in range(0, min(count, len(self._dataset)), _ORDER_CHUNK):
            rows = np.arange(first, min(first + _ORDER_CHUNK, count, len(self._dataset)))
            state.update(_places(self._dataset, rows).tobytes())
        return state.hexdigest()


@contextmanager
def _arrays_only() -> Iterator[None]:
    """Make ``numpy.load`` read, in this block, arrays of numbers and nothing else. Local.

    megatron-core reads its indices of samples with ``allow_pickle``, so a file that somebody else
    put into the cache could run any code.

    Raises:
        UsageError: In the block: a file holds objects, or is no array.
    """
    numpy: Any = np
    load = numpy.load

    def load_array(file: Any, **options: Any) -> Any:
        try:
            return load(file, **options | {"allow_pickle": False})
        except (ValueError, EOFError) as error:
            raise UsageError(
                f"--data-cache-path: {file} is no index of samples ({error}); remove it, and the "
                "next start makes it again"
            ) from error

    numpy.load = load_array
    try:
        yield
    finally:
        numpy.load = load


class _Rows(Sequence[TrainSample]):
    """A range of rows of a source, each read from disk on access."""

    def __init__(self, source: IndexedSamples, indices: range) -> None:
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        return self._source.read(self._indices[index], index)


def _places(dataset: Any, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return [rows, 3]: dataset of a blend, document, token offset in it, where each row begins."""
    places = np.zeros((len(rows), 3), np.int64)
    if hasattr(dataset, "dataset_index"):
        members = np.asarray(dataset.dataset_index[rows], np.int64)
        inner = np.asarray(dataset.dataset_sample_index[rows], np.int64)
        for member in np.unique(members):
            chosen = members == member
            places[chosen] = _places(dataset.datasets[member], inner[chosen])
        places[:, 0] = members
        return places
    begin = dataset.sample_index[dataset.shuffle_index[rows]]
    places[:, 1] = dataset.document_index[begin[:, 0]]
    places[:, 2] = begin[:, 1]
    return places


def _build(
    config: IndexedDataConfig, seed: int, seq_length: int, num_samples: int, vocab_size: int
) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    blend = parse_blend(config.data_path)
    weights = None if blend.weights is None else list(blend.weights)
    settings = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=(list(blend.prefixes), weights),
        split=config.split,
        path_to_cache=config.data_cache_path or None,
        tokenizer=_TokenIds(vocab_size),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    # Only the training data is built; its fraction still refers to the whole split.
    settings.split_matrix = [settings.split_matrix[0], None, None]
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 0, 0], lambda: True, settings)
    try:
        with _arrays_only():
            dataset, _, _ = builder.build()
    except FileNotFoundError as error:
        raise UsageError(
            f"--data-cache-path {config.data_cache_path or 'PREFIX/cache'}: rank {dist.get_rank()} "
            f"lacks {error.filename}, which rank 0 wrote; give a folder that all nodes see"
        ) from error
    if dataset is None or len(dataset) < num_samples:
        found = 0 if dataset is None else len(dataset)
        raise UsageError(
            f"--data-path {' '.join(blend.prefixes)} with --split {config.split} gives {found} "
            f"rows of {seq_length} tokens, the run takes {num_samples} (--train-iters x "
            "--global-batch-size); lower one of them, or give weights or more data"
        )
    return dataset
