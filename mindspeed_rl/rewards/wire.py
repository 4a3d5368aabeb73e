"""Messages between the pool and its workers: length-prefixed pickles over a socket pair.

Both ends are this package, on one machine, over an anonymous socket; nobody else can write to it.
"""

from __future__ import annotations

import enum
import pickle
import socket
import struct
from typing import Any, NamedTuple

_HEADER = struct.Struct("!Q")


class Kind(enum.IntEnum):
    """What a message is; the payload's type is in brackets."""

    SETUP = 0  # parent: [WorkerSetup]
    SCORE = 1  # parent: [list of RewardRequest]
    READY = 2  # worker: functions are loaded, limits are set [Ready]
    BAD_REWARD = 3  # worker: a function cannot be loaded, the user's fault [str]
    RESULT = 4  # worker: one per request, in order [RewardResult]
    LAST_RESULT = 5  # worker: as RESULT, then it exits; the rest was not started [RewardResult]


class Message(NamedTuple):
    """One message."""

    kind: Kind
    payload: Any


def encode(kind: Kind, payload: object) -> bytes:
    """One frame: 8 bytes of length, then the pickle."""
    body = pickle.dumps((int(kind), payload), protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


class FrameBuffer:
    """Bytes as they come in, messages as they become complete."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Append ``data``; return the messages completed by it, in order."""
        self._data += data
        messages = []
        start = 0
        while len(self._data) - start >= _HEADER.size:
            (num_bytes,) = _HEADER.unpack_from(self._data, start)
            end = start + _HEADER.size + num_bytes
            if len(self._data) < end:
                break
            kind, payload = pickle.loads(self._data[start + _HEADER.size : end])
            messages.append(Message(Kind(kind), payload))
            start = end
        del self._data[:start]
        return messages


def receive(connection: socket.socket) -> Message | None:
    """Block for one message; ``None`` when the other end is closed."""
    header = _receive_exactly(connection, _HEADER.size)
    if header is None:
        return None
    body = _receive_exactly(connection, _HEADER.unpack(header)[0])
    if body is None:
        return None
    kind, payload = pickle.loads(body)
    return Message(Kind(kind), payload)


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytearray | None:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if received == 0:
            return None
        view = view[received:]
    return data
