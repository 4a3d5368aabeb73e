"""Messages of a reward worker to its pool, as JSON.

A worker runs code of others, so what it sends is data: nothing that the pool reads can make it
execute anything. The other way, from the pool to the process that it started, objects are pickled.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, get_args

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards.types import RewardResult, RewardStatus

MAX_BYTES = 1 << 20
_MAX_TEXT_CHARS = 16_000  # of which each takes at most 12 bytes
_STATUSES = frozenset(get_args(RewardStatus))


class WireError(RuntimeError):
    """What a worker sent is no message."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Message of a worker: its functions are loaded, its limits are set.

    Attributes:
        notices: Remarks of the rewards about this machine.
        concurrency: Number of samples it can work on at a time; above 1 where it waits for others.
    """

    notices: tuple[str, ...]
    concurrency: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Message of a worker: the result of the oldest sample that it holds.

    Attributes:
        result: Result of the sample.
        is_last: Whether the worker ends now; it has not started the other samples.
    """

    result: RewardResult
    is_last: bool = False


WorkerMessage = Ready | Scored | UsageError


def encode(message: WorkerMessage) -> bytes:
    """Return the bytes of a message; the text of an error is cut."""
    if isinstance(message, UsageError):
        fields: dict[str, Any] = {"refused": str(message)[:_MAX_TEXT_CHARS]}
    elif isinstance(message, Ready):
        fields = {"ready": asdict(message)}
    else:
        result = asdict(message.result)
        result["detail"] = result["detail"][-_MAX_TEXT_CHARS:]
        fields = {"scored": result, "is_last": message.is_last}
    return json.dumps(fields, allow_nan=False).encode()


def decode(data: bytes) -> WorkerMessage:
    """Read a message.

    Raises:
        WireError: It is none, or a value in it is not what it should be.
    """
    try:
        fields = json.loads(data.decode("ascii"))
        match fields:
            case {"refused": str(text), **rest} if not rest:
                return UsageError(text)
            case {"ready": {"notices": notices, "concurrency": count, **others}, **rest} if (
                not rest and not others
            ):
                _require(isinstance(notices, list) and all(isinstance(n, str) for n in notices))
                _require(type(count) is int and count >= 1)
                return Ready(tuple(notices), count)
            case {"scored": {**result}, "is_last": bool(is_last), **rest} if not rest:
                return Scored(_result(result), is_last)
    except (ValueError, RecursionError) as error:
        raise WireError(f"no JSON: {error}") from error
    raise WireError("unknown fields")


def _result(fields: dict[Any, Any]) -> RewardResult:
    _require(fields.keys() == {"sample_id", "reward", "parts", "status", "detail"})
    reward, parts = fields["reward"], fields["parts"]
    _require(type(fields["sample_id"]) is int)
    _require(reward is None or _is_number(reward))
    _require(isinstance(parts, dict) and all(map(_is_number, parts.values())))
    _require(isinstance(fields["status"], str) and fields["status"] in _STATUSES)
    _require(isinstance(fields["detail"], str))
    return RewardResult(**fields)


def _is_number(value: object) -> bool:
    return type(value) is float and math.isfinite(value)


def _require(is_right: bool) -> None:
    if not is_right:
        raise WireError("a field has another type or value")
