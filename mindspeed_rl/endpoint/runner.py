"""Runs agents as the other side of conversations: a server, processes, and a thread for both."""

from __future__ import annotations

import asyncio
import copy
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from aiohttp import web

from mindspeed_rl.core.agents import AGENT_FLAG, AgentConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.endpoint.conversations import AgentConversations, ConversationRules
from mindspeed_rl.endpoint.server import Gate, make_app
from mindspeed_rl.endpoint.tasks import AgentTask
from mindspeed_rl.endpoint.workers import AgentEnd, AgentProcesses
from mindspeed_rl.environments.runners import Answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLOSE_LIMIT_S = 10.0
_SHUTDOWN_S = 0.1  # for requests that are being answered; aiohttp takes 0 as no limit


class AgentRunner:
    """Runs an agent for every conversation of an engine, as an `EnvironmentRunner`.

    The engine's thread asks and takes answers; everything else is in the thread of an event loop:
    the server, the conversations and the processes of agents.

    Args:
        rules: What holds for every conversation.
        tokenizer: Tokenizer of the run, which is copied: the engine's thread may use it meanwhile.
        number: Number of the engine, which is added to a port that is given.

    Attributes:
        base_url: Base URL for clients.

    Raises:
        UsageError: The agent cannot be loaded, the address cannot be listened on, or there is no
            token in the variable that is named.
    """

    def __init__(
        self, rules: ConversationRules, tokenizer: PreTrainedTokenizerBase, number: int = 0
    ) -> None:
        self._flags = rules.flags
        self._gate = Gate(endpoint_token(rules.flags, os.environ))
        self._answers: SimpleQueue[tuple[int, Answer] | Exception] = SimpleQueue()
        self._num_asked = 0
        self._conversations = AgentConversations(rules, copy.deepcopy(tokenizer), self._put)
        self._processes = AgentProcesses(
            rules.flags, self._started, self._conversations.end, self._answers.put
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="agent endpoint", daemon=True
        )
        self._thread.start()
        try:
            opening = asyncio.run_coroutine_threadsafe(self._open(number), self._loop)
            self.base_url = opening.result()
        except BaseException:
            self.close()
            raise

    def reset(self, prompts: Mapping[int, Prompt]) -> None:
        """Start the agents of new conversations; those of an earlier call have ended."""
        self._num_asked = len(prompts)
        self._call(partial(self._begin, prompts))

    def step(self, turns: Mapping[int, tuple[int, ...]]) -> None:
        """Pass turns of the model to the clients that wait for them."""
        self._num_asked += len(turns)
        for number, token_ids in turns.items():
            self._call(partial(self._conversations.take_turn, number, token_ids))

    def answers(self, wait_s: float) -> dict[int, Answer]:
        """Return what has come since the last call; see `EnvironmentRunner`.

        Raises:
            UsageError: Agents cannot be loaded any more.
        """
        found: dict[int, Answer] = {}
        while self._num_asked:
            try:
                one = self._answers.get(timeout=0.0 if found else wait_s)
            except Empty:
                break
            if isinstance(one, Exception):
                raise one
            found[one[0]] = one[1]
            self._num_asked -= 1
        return found

    def close(self) -> None:
        """Kill the agents and stop to listen. Idempotent."""
        if self._loop.is_closed():
            return
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        closing.result(CLOSE_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_LIMIT_S)
        self._loop.close()

    # --- in the thread of the event loop ---------------------------------------------------------

    def _call(self, work: Callable[[], None]) -> None:
        """Do something in the loop; an error of it ends the pass."""
        self._loop.call_soon_threadsafe(self._guarded, work)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._answers.put(error)

    async def _open(self, number: int) -> str:
        await self._processes.start()
        flags = self._flags
        port = flags.rl_endpoint_port + number if flags.rl_endpoint_port else 0
        self._server = web.AppRunner(
            make_app(self._gate, self._conversations), access_log=None, shutdown_timeout=_SHUTDOWN_S
        )
        await self._server.setup()
        site = web.TCPSite(self._server, flags.rl_endpoint_host, port)
        try:
            await site.start()
        except OSError as error:
            raise UsageError(
                f"--rl-endpoint-host {flags.rl_endpoint_host} --rl-endpoint-port {port}: cannot be "
                f"listened on: {error}; give the address of an interface of this node, and a port "
                "that is free, or 0"
            ) from error
        host, port = self._server.addresses[0][:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def _begin(self, prompts: Mapping[int, Prompt]) -> None:
        self._conversations.begin(prompts)
        names = {secrets.token_urlsafe(16): number for number in prompts}
        self._gate.open({name: self._conversations[n] for name, n in names.items()})
        for name, number in names.items():
            prompt = prompts[number]
            task = AgentTask(
                prompt.text, prompt.answer, prompt.metadata, self.base_url, self._gate.key(name)
            )
            self._processes.submit(number, task)

    def _started(self, number: int) -> None:
        overdue = partial(self._guarded, partial(self._overdue, number))
        self._conversations.start_clock(number, overdue)

    def _overdue(self, number: int) -> None:
        limit_s = self._flags.rl_agent_time_limit_s
        self._processes.give_up(number)
        lost = f"{AGENT_FLAG}: the agent did not return within --rl-agent-time-limit-s {limit_s:g}"
        self._conversations.end(number, AgentEnd(lost=lost))

    def _put(self, number: int, answer: Answer) -> None:
        self._answers.put((number, answer))

    async def _close(self) -> None:
        self._processes.close()
        if hasattr(self, "_server"):
            await self._server.cleanup()


def endpoint_token(flags: AgentConfig, environ: Mapping[str, str]) -> str:
    """Return the token that clients must know.

    Raises:
        UsageError: The variable that is named has none.
    """
    name = flags.rl_endpoint_token_variable
    if not name:
        return secrets.token_urlsafe(24)
    token = environ.get(name, "").strip()
    if not token:
        raise UsageError(
            f"--rl-endpoint-token-variable {name}: the variable is empty or not set on this node; "
            "export it there, or remove the flag for a random token"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(
            f"--rl-endpoint-token-variable {name}: its token has characters that no header of HTTP "
            "can carry; use printable ASCII without blanks"
        )
    return token
