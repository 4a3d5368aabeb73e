"""The prompt data set of a run: checked, tokenised and length-filtered before the first step.

Everything that can be wrong with the data is found at start-up, with the file and line named, so
every prompt in the training loop fits.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from mindspeed_rl.core.data_source import DataSource
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.data.cache import RowCache, StoredRows
from mindspeed_rl.data.chat import PromptEncoder, all_cores, check_token_ids, tokenizer_identity
from mindspeed_rl.data.library import content_digest
from mindspeed_rl.data.metadata import metadata_from_json, metadata_to_json
from mindspeed_rl.data.rows import DataRow, in_chunks, read_rows

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow
    from transformers import PreTrainedTokenizerBase

_FORMAT = 2  # of the cache's entries: a change of what is written here makes them anew
_DIGEST_BYTES = 16
_LONGEST_EPOCH = 100  # times the prompts of all sets
_READS = 64  # after which pages are given back; the system maps up to 1 MiB for each
_TEXT = ("utf-8", "surrogatepass")  # JSON can hold half of a surrogate pair


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt without its token ids; the fields are those of ``Prompt``."""

    text: str
    answer: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class PromptDataset(Sequence[Prompt]):
    """The prompts that are left after filtering, in file order; made by ``load_prompts``.

    They lie in a file that all ranks of a node map into their memory, and become a ``Prompt`` on
    access. Pages that were read are given back after some accesses: else each rank would seem to
    hold the whole file after an epoch, and the memory ledger would take it for a leak.

    Attributes:
        source: Name of the data set, as given.
        fingerprint: sha256 (hex) over token ids, answers and metadata of all prompts in order. A
            change of the file, tokenizer, chat template or limit that matters changes it.
        max_prompt_length: Length limit in tokens.
        num_filtered_long: Number of rows left out because their prompt is longer than that.
        metadata_keys: Columns that the metadata of any row has.
        table: Columns token_ids, text, answer, metadata, digest of all rows.
        pages: Mappings of the files that hold the table.
        rows: [number of prompts] row of each prompt; ``None``: prompt i is row i.
        opening: Token ids that every prompt has in place of its own; empty: their own.
        reads: Counts accesses.
    """

    source: str
    fingerprint: str
    max_prompt_length: int
    num_filtered_long: int
    metadata_keys: frozenset[str]
    table: pyarrow.Table
    pages: Sequence[mmap.mmap]
    rows: npt.NDArray[np.int64] | None = None
    opening: tuple[int, ...] = ()
    reads: Iterator[int] = field(default_factory=count)

    def __len__(self) -> int:
        return int(self.table.num_rows) if self.rows is None else len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        position = range(len(self))[index]
        question = self._question(self._row(position))
        return Prompt(
            index=position,
            token_ids=tuple(self.token_ids(position)),
            text=question.text,
            answer=question.answer,
            metadata=question.metadata,
        )

    def token_ids(self, index: int) -> list[int]:
        """Return the token ids of a prompt without the rest of it."""
        if self.opening:
            return list(self.opening)
        found: list[int] = self.table["token_ids"][self._row(index)].values.to_numpy().tolist()
        self._give_back()
        return found

    def opened(self, token_ids: tuple[int, ...]) -> PromptDataset:
        """Return the data set with these token ids as every prompt, where an agent decides."""
        return replace(self, opening=token_ids)

    def num_tokens(self) -> npt.NDArray[np.int64]:
        """Return [number of prompts] the tokens of each."""
        import numpy as np
        import pyarrow.compute

        if self.opening:
            return np.full(len(self), len(self.opening), dtype=np.int64)
        found = pyarrow.compute.list_value_length(self.table["token_ids"]).to_numpy()
        lengths = np.asarray(found, dtype=np.int64)
        return lengths if self.rows is None else lengths[self.rows]

    def questions(self) -> Iterator[Question]:
        """Yield what is asked in every row of the data, once, however often it is dealt out."""
        for row in range(self.table.num_rows):
            yield self._question(row)

    def digests(self) -> list[bytes]:
        """Return a digest of the token ids of every row: equal where the prompts are."""
        found: list[bytes] = self.table["digest"].to_pylist()
        return found

    def text(self, row: int) -> str:
        """Return the last user message of a row of the data."""
        return self._string("text", row)

    def report(self) -> str:
        """Return a line for the log: number of prompts, of those left out and why, and lengths."""
        lengths, kept = self.num_tokens(), self.table.num_rows
        dealt = "" if len(self) == kept else f"; {len(self)} in an epoch, by the weights"
        return (
            f"{self.source}: {kept} of {kept + self.num_filtered_long} prompts{dealt}; "
            f"{self.num_filtered_long} left out, longer than --max-prompt-length "
            f"{self.max_prompt_length} tokens; prompt tokens min {lengths.min()}, "
            f"mean {lengths.sum() / len(lengths):.1f}, max {lengths.max()}"
        )

    def _row(self, index: int) -> int:
        return index if self.rows is None else int(self.rows[index])

    def _string(self, column: str, row: int) -> str:
        return str(self.table[column][row].as_py(), *_TEXT)

    def _question(self, row: int) -> Question:
        found = Question(
            self.text(row),
            self._string("answer", row),
            metadata_from_json(self.table["metadata"][row].as_py()),
        )
        self._give_back()
        return found

    def _give_back(self) -> None:
        """Give back the pages that were read; nothing refers to them any more."""
        if next(self.reads) % _READS == _READS - 1:
            for pages in self.pages:
                pages.madvise(mmap.MADV_DONTNEED)


def load_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    vocab_size: int,
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    apply_chat_template: bool = True,
    system_message: str = "",
    cache: RowCache | None = None,
    flag: str = "--prompt-data",
) -> PromptDataset:
    """Load the prompts of a run; equal on every rank that reads the same data.

    They are tokenised by one process of the node, once for all runs with the same data, tokenizer,
    template and arguments.

    A key may reach into nested objects: ``answer_key="reward_model.ground_truth"``.

    Args:
        path: Name of the data set: see ``DataSource``.
        tokenizer: A ``transformers`` tokenizer; a fast one uses all cores.
        max_prompt_length: Length of the longest prompt kept, in tokens, chat template included.
        vocab_size: Vocabulary size of the model; the ids of all rows must be below it.
        prompt_key: Column with a list of ``{"role", "content"}`` messages or a string.
        answer_key: Column with the reference answer, a string or number.
        apply_chat_template: Whether to render prompts through the tokenizer's chat template with
            the generation prompt; off for base models with plain-text prompts.
        system_message: Text of a system message for prompts without one; empty: none.
        cache: Where the tokenised prompts are kept.
        flag: Flag that names the data set, for messages.

    Raises:
        UsageError: the data set is missing or broken; a row lacks its prompt or answer (the message
            names file, line and key), or has no token or one outside the vocabulary; or no prompt
            is left.
    """
    if max_prompt_length < 1:
        raise UsageError(f"--max-prompt-length {max_prompt_length}: give at least 1 token")
    source = DataSource.parse(str(path), flag)
    encoder = PromptEncoder(tokenizer, prompt_key, apply_chat_template, system_message)
    keys = (prompt_key, answer_key)
    limits = (max_prompt_length, vocab_size, *keys, apply_chat_template, system_message)
    readers = [version(name) for name in ("datasets", "pyarrow")]
    content = content_digest(source, flag)
    what = [_FORMAT, readers, content, tokenizer_identity(tokenizer), *limits]
    stored = (cache or RowCache()).open(
        Path(source.place).stem,
        hashlib.sha256(json.dumps(what).encode()).hexdigest(),
        _PromptWriter(source, encoder, answer_key, max_prompt_length, vocab_size, flag),
        f"{flag} {source.text}",
    )
    return _dataset(source.text, max_prompt_length, stored)


def _dataset(text: str, max_prompt_length: int, stored: StoredRows) -> PromptDataset:
    return PromptDataset(
        source=text,
        fingerprint=stored.facts["fingerprint"],
        max_prompt_length=max_prompt_length,
        num_filtered_long=stored.facts["num_filtered_long"],
        metadata_keys=frozenset(stored.facts["metadata_keys"]),
        table=stored.table,
        pages=[stored.pages],
    )


def blend(
    datasets: Sequence[PromptDataset], weights: Sequence[float] | None = None
) -> PromptDataset:
    """Make one data set of several, without a copy of their prompts.

    Args:
        datasets: Data sets with the same length limit.
        weights: Share of each in an epoch, up to a factor; ``None``: one epoch has every prompt
            once. With weights an epoch is as long as the set that is largest for its weight needs
            to be dealt out once; each other one is repeated, its rows equally often up to one.

    Returns:
        The data set; a single one without weights is returned as it is.
    """
    import numpy as np
    import pyarrow

    if len(datasets) == 1:
        return datasets[0]
    sizes = [len(dataset) for dataset in datasets]
    rows = None
    if weights is not None:
        longest = max(size / weight for size, weight in zip(sizes, weights, strict=True))
        counts = [max(size, round(w * longest)) for size, w in zip(sizes, weights, strict=True)]
        if sum(counts) > _LONGEST_EPOCH * sum(sizes):
            raise UsageError(
                f"--prompt-data: with these weights an epoch has {sum(counts)} prompts, more than "
                f"{_LONGEST_EPOCH} times the {sum(sizes)} there are; give small sets smaller "
                "weights, or take rows out of the large ones"
            )
        starts = np.cumsum([0, *sizes[:-1]])
        rows = np.concatenate(
            [
                start + np.arange(dealt) * size // dealt
                for start, size, dealt in zip(starts, sizes, counts, strict=True)
            ]
        )
    names = [dataset.source for dataset in datasets]
    parts = [dataset.fingerprint for dataset in datasets]
    return PromptDataset(
        source=" ".join(names if weights is None else map("{:g} {}".format, weights, names)),
        fingerprint=hashlib.sha256(json.dumps([parts, weights]).encode()).hexdigest(),
        max_prompt_length=datasets[0].max_prompt_length,
        num_filtered_long=sum(dataset.num_filtered_long for dataset in datasets),
        metadata_keys=frozenset().union(*(dataset.metadata_keys for dataset in datasets)),
        table=pyarrow.concat_tables([dataset.table for dataset in datasets]),
        pages=[pages for dataset in datasets for pages in dataset.pages],
        rows=rows,
    )


@dataclass(frozen=True, slots=True)
class _PromptWriter:
    """Tokenises a data set into a file, a few rows in memory at a time."""

    source: DataSource
    encoder: PromptEncoder
    answer_key: str
    max_prompt_length: int
    vocab_size: int
    flag: str

    def __call__(self, path: Path, on_rows: Callable[[int], None]) -> dict[str, Any]:
        """Write the rows; return the facts about them."""
        import pyarrow

        schema = _schema()
        content, keys = hashlib.sha256(), set[str]()
        num_rows = num_kept = 0
        with (
            all_cores(),
            pyarrow.OSFile(str(path), "wb") as sink,
            pyarrow.ipc.new_stream(sink, schema) as file,
        ):
            for rows in in_chunks(read_rows(self.source, self.flag)):
                kept = list(self._kept(rows))
                for _, question, token_ids in kept:
                    row = [token_ids, question.answer, question.metadata]
                    content.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
                    keys.update(question.metadata)
                if kept:
                    file.write_batch(_batch(kept, schema))
                num_rows, num_kept = num_rows + len(rows), num_kept + len(kept)
                on_rows(num_rows)
        if not num_kept:
            raise UsageError(
                f"{self.flag} {self.source.text}: no prompt is left: {num_rows} rows were read and "
                f"all are longer than --max-prompt-length {self.max_prompt_length} tokens; raise "
                "it or use another file"
            )
        return {
            "fingerprint": content.hexdigest(),
            "num_filtered_long": num_rows - num_kept,
            "metadata_keys": sorted(keys),
        }

    def _kept(self, rows: Sequence[DataRow]) -> Iterator[tuple[str, Question, list[int]]]:
        prompt_key = self.encoder.prompt_key
        prompts = [self.encoder.render(row) for row in rows]
        questions = [
            Question(
                prompt.text,
                row.text(self.answer_key, "--answer-key"),
                _metadata(row, prompt_key, self.answer_key),
            )
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        encoded = self.encoder.encode(prompts)
        for row, question, token_ids in zip(rows, questions, encoded, strict=True):
            check_token_ids(row.where, token_ids, self.vocab_size)
            if len(token_ids) <= self.max_prompt_length:
                yield row.where, question, token_ids


def _schema() -> pyarrow.Schema:
    import pyarrow

    return pyarrow.schema(
        [
            ("token_ids", pyarrow.list_(pyarrow.int32())),
            *((name, pyarrow.large_binary()) for name in ("text", "answer", "metadata")),
            ("digest", pyarrow.binary(_DIGEST_BYTES)),
        ]
    )


def _batch(
    kept: Sequence[tuple[str, Question, list[int]]], schema: pyarrow.Schema
) -> pyarrow.RecordBatch:
    import pyarrow

    columns = [
        [token_ids for _, _, token_ids in kept],
        [question.text.encode(*_TEXT) for _, question, _ in kept],
        [question.answer.encode(*_TEXT) for _, question, _ in kept],
        [metadata_to_json(question.metadata, where) for where, question, _ in kept],
        [_digest(token_ids) for _, _, token_ids in kept],
    ]
    return pyarrow.record_batch(columns, schema=schema)


def rows_table(prompts: Sequence[list[int]]) -> pyarrow.Table:
    """Return the table of prompts that have token ids alone."""
    import pyarrow

    schema, nothing = _schema(), Question("", "", {})
    kept = [("", nothing, token_ids) for token_ids in prompts]
    return pyarrow.Table.from_batches([_batch(kept, schema)])


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("i", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


def _metadata(row: DataRow, prompt_key: str, answer_key: str) -> dict[str, Any]:
    """Return the content of the column ``metadata``, on top of all other columns of the row."""
    nested = row.get("metadata")
    if nested is not None and not isinstance(nested, Mapping):
        raise UsageError(
            f"{row.where}: column 'metadata' holds {nested!r}, but an object is needed; "
            "rename the column: all other columns are metadata as they are"
        )
    named = (prompt_key, answer_key, "metadata")
    others = {key: value for key, value in row.values.items() if key not in named}
    return {**others, **(nested or {})}
