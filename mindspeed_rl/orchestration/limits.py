"""How patient a watchdog is. Imports nothing, so that an entry can name it before torch."""

from __future__ import annotations

from dataclasses import dataclass

# The phase in which ranks meet: it waits for the slowest node's start, so its limit is another.
JOIN = "join"
# For a rank to write the stacks of all its threads on a busy machine.
STACKS_S = 2.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Patience, in seconds.

    Attributes:
        interval_s: between two heartbeats while the phase stays.
        look_s: how long another phase may go untold.
        silence_s: without a heartbeat a rank is taken for stopped or its machine for dead. Native
            code that keeps Python's lock for longer (a cold import) must fit in.
        patience_s: how long a rank that merely lost a connection looks for the true cause; several
            intervals.
        linger_s: how long the rank that tells a failure stays, so that others read it.
        exit_s: limit for the exit handlers of libraries.
        connect_s: how long the launcher of the first node may take to answer.
    """

    interval_s: float = 1.0
    look_s: float = 0.2
    silence_s: float = 40.0
    patience_s: float = 3.5
    linger_s: float = 2.5
    exit_s: float = 60.0
    connect_s: float = 30.0

    @property
    def end_s(self) -> float:
        """Until every rank that can read of a failure has read it, told what it must, and left."""
        return self.interval_s + 2 * self.linger_s + STACKS_S
