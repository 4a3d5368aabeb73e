"""The responses of earlier steps, from which drafts are made: bounded, and kept in a file.

The file is a line of JSON and the records of all responses. What a run samples does not depend on
it, so a file that does not fit is dropped with a line.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

FORMAT = 1
# Bytes that a response takes beside its tokens.
_OVERHEAD = 128
_RECORD = struct.Struct("<16sI")
PromptKey = bytes


def prompt_key(token_ids: Sequence[int]) -> PromptKey:
    """Return 16 bytes that stand for the tokens of a prompt."""
    data = array("q", token_ids).tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


class DraftHistory:
    """The newest responses to each prompt, of which the least recently used prompts leave first.

    Args:
        limit_bytes: Most bytes of all responses, see ``num_bytes``.
        per_prompt: Most responses of a prompt.

    Attributes:
        num_bytes: Bytes of all responses, with an allowance for the objects that hold them.
    """

    def __init__(self, limit_bytes: int, per_prompt: int = 16) -> None:
        self.limit_bytes = limit_bytes
        self._per_prompt = per_prompt
        self._responses: OrderedDict[PromptKey, list[array[int]]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._responses.values()))

    def add(self, key: PromptKey, token_ids: Sequence[int]) -> None:
        """Add a response; what is then too much leaves, oldest first."""
        response = array("i", token_ids)
        found = self._responses.setdefault(key, [])
        self._responses.move_to_end(key)
        found.append(response)
        self.num_bytes += _size(response)
        if len(found) > self._per_prompt:
            self.num_bytes -= _size(found.pop(0))
        while self.num_bytes > self.limit_bytes:
            _, oldest = self._responses.popitem(last=False)
            self.num_bytes -= sum(map(_size, oldest))

    def earlier(self, key: PromptKey) -> Sequence[array[int]]:
        """Return the responses to a prompt, the newest last; the prompt counts as used."""
        found = self._responses.get(key)
        if found is None:
            return ()
        self._responses.move_to_end(key)
        return found

    def _records(self) -> Iterator[bytes]:
        for key, responses in self._responses.items():
            for response in responses:
                yield _RECORD.pack(key, len(response)) + response.tobytes()

    def to_bytes(self, fingerprint: str) -> bytes:
        """Return the content of a file.

        Args:
            fingerprint: What the numbers of tokens mean, as that of the tokenizer.
        """
        body = b"".join(self._records())
        header = {
            "format": FORMAT,
            "fingerprint": fingerprint,
            "bytes": len(body),
            "digest": hashlib.blake2b(body, digest_size=16).hexdigest(),
        }
        return json.dumps(header).encode() + b"\n" + body

    def load(self, content: bytes, fingerprint: str, vocab_size: int) -> str:
        """Take the responses of a file, or none of them.

        Args:
            content: Content of the file.
            fingerprint: That of this run, see :meth:`to_bytes`.
            vocab_size: Upper limit of tokens, exclusive: the engine looks every draft up.

        Returns:
            Why the content is dropped; empty where it was taken.
        """
        line, _, body = content.partition(b"\n")
        try:
            header = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            return "it has no header"
        if header.get("format") != FORMAT:
            return f"its format is {header.get('format')}, this version reads {FORMAT}"
        if header.get("fingerprint") != fingerprint:
            return "it is for another tokenizer"
        size = header.get("bytes")
        if isinstance(size, int) and size > self.limit_bytes:
            return f"its {size} bytes are more than the limit of {self.limit_bytes}"
        digest = hashlib.blake2b(body, digest_size=16).hexdigest()
        if size != len(body) or header.get("digest") != digest:
            return "it is corrupt"
        try:
            records = list(_records_of(body))
        except (struct.error, ValueError):
            return "it is corrupt"
        if any(r and not 0 <= min(r) <= max(r) < vocab_size for _, r in records):
            return f"it has tokens outside the model's vocabulary of {vocab_size}"
        for key, response in records:
            self.add(key, response)
        return ""


def _records_of(body: bytes) -> Iterator[tuple[PromptKey, array[int]]]:
    """Yield prompts and responses; raises `struct.error` or `ValueError` where one is cut off."""
    offset = 0
    while offset < len(body):
        key, count = _RECORD.unpack_from(body, offset)
        start = offset + _RECORD.size
        offset = start + 4 * count
        if offset > len(body):
            raise ValueError(f"a response of {count} tokens is cut off")
        yield key, array("i", body[start:offset])


def _size(response: array[int]) -> int:
    return response.itemsize * len(response) + _OVERHEAD
