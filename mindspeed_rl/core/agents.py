"""Flags of agents that talk to the policy over HTTP, and of the endpoint that they talk to."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.core.flag import Needs, flag

AGENT_FLAG = "--rl-agent"
_WITH_AGENT = Needs(AGENT_FLAG)


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Agents.

    With an agent a response is whatever the agent talks with the policy: a function of yours gets a
    task, uses any client of the OpenAI API, and returns the reward. While it runs, the process that
    leads each engine serves /v1/chat/completions. The exact tokens that were sampled are trained
    on; messages are never tokenised again. --rollout-max-response-length is the limit of a whole
    conversation, the agent's messages included.

    Example: --rl-agent agent.py:solve --reward-function environment
    """

    rl_agent: str = flag(
        "",
        "An agent, FILE.py:FUNCTION, plain or async; empty for none. It is called once for every "
        "sample with a task (prompt, answer, metadata, base_url, api_key, model) and returns the "
        "reward, or None where reward functions score alone.",
    )
    rl_agent_max_turns: int = flag(
        16,
        "Turns of the model in one conversation; further requests are refused.",
        minimum=1,
        needs=_WITH_AGENT,
    )
    rl_agent_time_limit_s: float = flag(
        600.0,
        "Seconds from the start of an agent to its return, its turns included; afterwards its "
        "sample has no reward and counts as failed.",
        above=0.0,
        needs=_WITH_AGENT,
    )
    rl_agent_workers: int = flag(
        2,
        "Processes per engine in which agents run.",
        minimum=1,
        needs=_WITH_AGENT,
    )
    rl_agent_threads: int = flag(
        32,
        "Agents that run side by side in each of these processes, each in a thread.",
        minimum=1,
        needs=_WITH_AGENT,
    )
    rl_agent_secrets: tuple[str, ...] = flag(
        (),
        "Environment variables with secrets that the processes of agents get; all others are kept "
        "from them: names with TOKEN, KEY, SECRET, PASSWORD or the like, and URLs with a password.",
        nargs="+",
        needs=_WITH_AGENT,
    )
    rl_endpoint_host: str = flag(
        "127.0.0.1",
        "Address of the interface on which the endpoint of each engine listens.",
        needs=_WITH_AGENT,
    )
    rl_endpoint_port: int = flag(
        0,
        "Port of the first engine's endpoint; each further engine has the next. 0: free ports.",
        minimum=0,
        maximum=65535,
        needs=_WITH_AGENT,
    )
    rl_endpoint_token_variable: str = flag(
        "",
        "Environment variable with the token that clients of the endpoint must know; empty: a "
        "random one for each start. The token itself belongs on no command line.",
        needs=_WITH_AGENT,
    )

    @property
    def at_once(self) -> int:
        """Agents of one engine that run side by side."""
        return self.rl_agent_workers * self.rl_agent_threads
