"""The conversations of agents with one engine: requests become turns, and ends become samples.

All of this runs in one thread, that of the server's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mindspeed_rl.core.agents import AgentConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.endpoint.answers import AnswerHead, ModelTurn
from mindspeed_rl.endpoint.history import ChatHistory, ChatPlace
from mindspeed_rl.endpoint.live import LiveText, LiveTurn
from mindspeed_rl.endpoint.requests import ApiError, ChatRequest
from mindspeed_rl.endpoint.tools import ToolCall, Tools, split_calls, why_no_tools
from mindspeed_rl.endpoint.workers import AgentEnd
from mindspeed_rl.environments import Failed, Observation
from mindspeed_rl.environments.chat import TemplateRefusal, message_tokens, opening_tokens
from mindspeed_rl.environments.runners import Answer
from mindspeed_rl.environments.types import Watch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConversationRules:
    """What holds for every conversation.

    Attributes:
        flags: Flags of agents.
        limit: Most tokens behind the prompt of one conversation.
        stop_token_ids: Tokens that end a turn.
    """

    flags: AgentConfig
    limit: int
    stop_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class SaidTurn:
    """A turn of the model, and where it belongs.

    Attributes:
        turn: Its number, counted from 1.
        asked: Digest of what was asked.
        answer: The answer.
        read: Number of the turn that the agent had read last before.
    """

    turn: int
    asked: bytes
    answer: ModelTurn
    read: int


@dataclass
class Conversation:
    """One conversation between an agent and the policy.

    Attributes:
        asked: Whether the engine waits for what comes next.
        reply: Gets the tokens of the turn that the engine generates.
        end: What is left to say once the engine has generated the present turn; set: it is over.
        read: Number of the turn that the agent has last read, counted from 1; 0: none.
        reader: Request whose answer that turn was; ``None``: it was taken back.
        refused: Whether its last request was beyond a limit.
        undelivered: The answer of a request whose client was gone.
        timer: Ends the conversation at its time limit.
    """

    number: int
    prompt: Prompt
    history: ChatHistory = field(default_factory=ChatHistory)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked: bool = True
    reply: asyncio.Future[tuple[int, ...]] | None = None
    end: Answer | None = None
    read: int = 0
    reader: ChatRequest | None = None
    refused: bool = False
    undelivered: SaidTurn | None = None
    timer: asyncio.TimerHandle | None = None


class AgentConversations:
    """The conversations of one pass, by number.

    Args:
        rules: What holds for each.
        tokenizer: Tokenizer that no other thread uses.
        answer: Gets what the engine is to know: the beginning of a turn, or the end.
    """

    def __init__(
        self,
        rules: ConversationRules,
        tokenizer: PreTrainedTokenizerBase,
        answer: Callable[[int, Answer], None],
    ) -> None:
        self._rules = rules
        self._tokenizer = tokenizer
        self._answer = answer
        self._all: dict[int, Conversation] = {}
        self._noted: set[str] = set()
        self._no_tools: str | None = None  # why the template has no tools; not yet looked at

    def __getitem__(self, number: int) -> Conversation:
        return self._all[number]

    def begin(self, prompts: Mapping[int, Prompt]) -> None:
        """Begin conversations in place of those of an earlier pass, which have ended."""
        for conversation in self._all.values():
            assert conversation.end is not None, "a pass ends when its conversations have"
        self._all = {number: Conversation(number, prompt) for number, prompt in prompts.items()}

    def start_clock(self, number: int, on_overdue: Callable[[], None]) -> None:
        """Call back when a conversation has not ended at its time limit, which begins now."""
        limit_s = self._rules.flags.rl_agent_time_limit_s
        loop = asyncio.get_running_loop()
        self._all[number].timer = loop.call_later(limit_s, on_overdue)

    def end(self, number: int, how: AgentEnd) -> None:
        """End a conversation with what its agent returned; no effect when it has ended."""
        conversation = self._all[number]
        if conversation.end is not None:
            return
        if conversation.timer is not None:
            conversation.timer.cancel()
        conversation.end = _outcome(conversation, how)
        if conversation.asked:
            self._give(conversation, conversation.end)

    def take_turn(self, number: int, token_ids: tuple[int, ...]) -> None:
        """Take a turn that the engine has generated."""
        conversation = self._all[number]
        conversation.asked = True
        reply, conversation.reply = conversation.reply, None
        assert reply is not None, "the engine gave a turn that nobody asked for"
        if not reply.done():
            reply.set_result(token_ids)
        if conversation.end is not None:
            self._give(conversation, conversation.end)

    def _give(self, conversation: Conversation, answer: Answer) -> None:
        assert conversation.asked, "the engine is told once what comes next"
        conversation.asked = False
        self._answer(conversation.number, answer)

    def live_turn(self, request: ChatRequest) -> LiveTurn:
        """Return what a client reads its turn from while the engine samples it."""
        return LiveTurn(LiveText(self._decode, calls=bool(request.tools)))

    async def complete(
        self,
        conversation: Conversation,
        request: ChatRequest,
        is_connected: Callable[[], bool],
        live: LiveTurn | None = None,
    ) -> SaidTurn:
        """Return the turn that answers a request; those of one conversation wait for each other.

        Args:
            conversation: Conversation that the client's key stands for.
            request: What it asks for.
            is_connected: Whether the client still waits.
            live: Gets the turn while it is sampled.

        Raises:
            ApiError: The conversation is over or at a limit, or the template refuses the messages.
        """
        self._note_overridden(request)
        async with conversation.turn:
            _check_open(conversation)
            self._check_tools(request)
            place = conversation.history.find(request.messages, request.tools)
            undelivered, conversation.undelivered = conversation.undelivered, None
            if undelivered is not None and undelivered.asked == place.digest:
                said = undelivered  # a client that asks again after it had gone
            else:
                said = await self._turn(conversation, place, request, live)
            if is_connected():
                conversation.read, conversation.reader = said.turn, request
            else:
                conversation.undelivered = said
            return said

    def take_back(self, conversation: Conversation, said: SaidTurn, request: ChatRequest) -> None:
        """Take a turn back that its client was reading when the connection broke.

        No effect where another request has read it, or a later turn, since.
        """
        if conversation.reader is request and conversation.read == said.turn:
            conversation.read, conversation.undelivered = said.read, said
            conversation.reader = None

    async def _turn(
        self,
        conversation: Conversation,
        place: ChatPlace,
        request: ChatRequest,
        live: LiveTurn | None,
    ) -> SaidTurn:
        history = conversation.history
        heard = self._tokens(conversation, place, request.tools)
        before = history.length(place.behind) + len(heard)
        self._check_limits(conversation, before)
        if place.behind != len(history):
            self._note_branch(conversation, place)
        reply = conversation.reply = asyncio.get_running_loop().create_future()
        head = AnswerHead(f"chatcmpl-{conversation.number}-{len(history) + 1}")
        watch = None if live is None else _begin(live, head)
        most, behind = request.max_tokens, place.behind
        self._give(conversation, Observation(heard, behind=behind, max_tokens=most, watch=watch))
        token_ids = await reply
        _check_open(conversation)
        cut = token_ids[-1] not in self._rules.stop_token_ids
        said = token_ids if cut else token_ids[:-1]
        text = self._decode(said) if live is None else live.end(said)
        calls: tuple[ToolCall, ...] = ()
        if request.tools and not cut:
            text, calls = split_calls(text)
        functions = [call.function for call in calls]
        history.add(place, before + len(token_ids), text, functions, cut=cut)
        asked = len(conversation.prompt.token_ids) + before
        answer = ModelTurn(head, text, calls, cut, asked=asked, said=len(token_ids))
        return SaidTurn(len(history), place.digest, answer, conversation.read)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _check_tools(self, request: ChatRequest) -> None:
        """Refuse tools and calls with a chat template that has no place for them."""
        if request.tools or any("tool_calls" in message for message in request.messages):
            if self._no_tools is None:
                self._no_tools = why_no_tools(self._tokenizer)
            if self._no_tools:
                raise ApiError(
                    400,
                    "unsupported_parameter",
                    f"tools: {self._no_tools}; describe the tools in a message, and read the call "
                    "in the text",
                )

    def _tokens(
        self, conversation: Conversation, place: ChatPlace, tools: Tools
    ) -> tuple[int, ...]:
        """Return the tokens that the new messages of a request are."""
        try:
            if place.behind:
                cut = conversation.history.cut(place.behind)
                return message_tokens(self._tokenizer, place.messages, cut=cut)
            heard = opening_tokens(self._tokenizer, place.messages, tools)
        except (TemplateRefusal, UsageError) as error:
            raise ApiError(
                400, "chat_template", f"messages: the model's chat template: {error}"
            ) from error
        first = conversation.prompt.token_ids
        if heard[: len(first)] != first:
            wanted, found = (
                self._tokenizer.decode(list(ids)) for ids in (first, heard[: len(first)])
            )
            raise ApiError(
                400,
                "chat_template",
                f"messages: the chat template begins them with {found!r}, and every conversation "
                f"of this run begins with {wanted!r}, as a user's message does; put what the first "
                "message says into the user's",
            )
        return heard[len(first) :]

    def _check_limits(self, conversation: Conversation, before: int) -> None:
        """Refuse a turn beyond a limit, where the engine's side would end the conversation.

        Args:
            conversation: The conversation.
            before: Tokens behind the prompt that the model would read.
        """
        most, limit = self._rules.flags.rl_agent_max_turns, self._rules.limit
        out_of_turns = len(conversation.history) >= most
        conversation.refused = out_of_turns or before >= limit
        if out_of_turns:
            raise ApiError(400, "max_turns", f"--rl-agent-max-turns {most}: all turns were used")
        if before >= limit:
            raise ApiError(
                400,
                "context_length_exceeded",
                f"the messages have {before} tokens of the {limit} that a conversation may have "
                "(--rollout-max-response-length)",
            )

    def _note_branch(self, conversation: Conversation, place: ChatPlace) -> None:
        if "branch" not in self._noted:
            self._noted.add("branch")
            logger.warning(
                "sample %d: the agent's messages go on behind turn %d of %d, since it changed or "
                "left out what came later; of such a conversation the branch of the last turn is "
                "trained on. environment/branches and environment/dropped_tokens count them; this "
                "is said once",
                conversation.number,
                place.behind,
                len(conversation.history),
            )

    def _note_overridden(self, request: ChatRequest) -> None:
        for name in request.overridden:
            if name not in self._noted:
                self._noted.add(name)
                logger.warning(
                    "the agent asks for %s; sampling is that of the run, which is trained on. This "
                    "is said once",
                    name,
                )


def _begin(live: LiveTurn, head: AnswerHead) -> Watch:
    """Return what the engine's thread calls with tokens of a turn that a client reads."""
    live.head = head
    loop = asyncio.get_running_loop()

    def watch(first: int, token_ids: tuple[int, ...]) -> None:
        loop.call_soon_threadsafe(live.note, first, token_ids)

    return watch


def _check_open(conversation: Conversation) -> None:
    if conversation.end is not None:
        raise ApiError(410, "conversation_over", "this conversation is over; its key has ended")


def _outcome(conversation: Conversation, how: AgentEnd) -> Answer:
    """Return what the engine's side is told at the end of an agent.

    The sample ends with the last turn that the agent has read. An agent that stopped at a limit of
    the conversation has a sample that was cut, even where it raised the refusal.
    """
    if how.lost or (how.raised and not conversation.refused):
        return Failed(how.lost or how.raised)
    if not conversation.read:
        return Failed(how.raised or "the agent returned before it had read a turn of the model")
    return Observation(
        done=True, reward=how.reward, behind=conversation.read, cut=conversation.refused
    )
