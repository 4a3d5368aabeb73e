"""What the built-in rewards are told besides the sample: the reward flags in plain types."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_rl.config.rewards import REMOTE_BACKOFF_S

ROW_REWARDS_KEY = "rewards"


@dataclass(frozen=True, slots=True)
class CodeSettings:
    """How the reward ``code`` runs programs.

    Attributes:
        time_limit_s: wall clock and processor time of one test.
        memory_bytes: address space of each process of a program.
        max_processes: processes and threads of a program.
        file_bytes: largest file it may write, its output included.
        score: ``"all"`` (1 when every test passes) or ``"fraction"`` (share that passes).
        network: ``"auto"`` (cut off where the kernel allows, else said so) or ``"require"``.
    """

    time_limit_s: float = 4.0
    memory_bytes: int = 1 << 30
    max_processes: int = 16
    file_bytes: int = 16 << 20
    score: str = "all"
    network: str = "auto"


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How the reward ``remote`` asks its server.

    Attributes:
        url: where samples are posted; empty for none.
        timeout_s: of one attempt.
        retries: further attempts after the first.
        backoff_s: pause before the first further attempt; doubles with each.
        concurrency: requests in flight per reward process.
    """

    url: str = ""
    timeout_s: float = 2.0
    retries: int = 3
    backoff_s: float = REMOTE_BACKOFF_S
    concurrency: int = 8


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """For all built-in rewards.

    Attributes:
        row_key: metadata field that names the rewards of a row.
        max_response_tokens: limit of a response; 0: unknown.
        length_target: tokens up to which the reward ``length`` is 1.
        format_regex: for the reward ``format``, of rows without one of their own.
        code: for the reward ``code``.
        remote: for the reward ``remote``.
    """

    row_key: str = ROW_REWARDS_KEY
    max_response_tokens: int = 0
    length_target: int = 0
    format_regex: str = ""
    code: CodeSettings = field(default_factory=CodeSettings)
    remote: RemoteSettings = field(default_factory=RemoteSettings)
