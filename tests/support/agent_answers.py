"""What the clients of an agent's conversations have answered, for tests of the endpoint."""

from __future__ import annotations

import time
from typing import Any

from mindspeed_rl.endpoint.runner import AgentRunner


def answers(runner: AgentRunner, count: int, limit_s: float) -> dict[int, Any]:
    """Return so many answers, by sample, as soon as they have come, or those there are in time."""
    found: dict[int, Any] = {}
    ends = time.monotonic() + limit_s
    while len(found) < count and time.monotonic() < ends:
        found |= runner.answers(0.1)
    return found
