"""The HTTP side: /v1/models and /v1/chat/completions, for clients that know the token."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from typing import Any

from aiohttp import web

from mindspeed_rl.endpoint.conversations import AgentConversations, Conversation
from mindspeed_rl.endpoint.requests import ApiError, parse_request
from mindspeed_rl.endpoint.streams import send_events
from mindspeed_rl.endpoint.tasks import MODEL

MAX_BODY_BYTES = 2**26
_SEPARATOR = "."


class Gate:
    """The keys of clients: the token of the run, and the part that stands for a conversation.

    Args:
        token: Token of the run.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._open: dict[str, Conversation] = {}

    def key(self, name: str) -> str:
        """Return the key of a conversation with a name that cannot be guessed."""
        return f"{self._token}{_SEPARATOR}{name}"

    def open(self, conversations: dict[str, Conversation]) -> None:
        """Let these conversations in by their names, and no others."""
        self._open = conversations

    def check(self, request: web.Request) -> str:
        """Return the name of a conversation, or an empty text, from a request with the token.

        Raises:
            ApiError: The token is missing or wrong.
        """
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        known = self._token.encode()
        given = key.encode(errors="surrogateescape")  # bytes that are no UTF-8 are a wrong token
        token, name = given[: len(known)], key[len(self._token) :]
        if scheme.lower() != "bearer" or not hmac.compare_digest(token, known):
            raise ApiError(401, "invalid_api_key", "give the api_key of the agent's task")
        if name and not name.startswith(_SEPARATOR):
            raise ApiError(401, "invalid_api_key", "give the api_key of the agent's task")
        return name.removeprefix(_SEPARATOR)

    def conversation(self, request: web.Request) -> Conversation:
        """Return the conversation that the key of a request stands for.

        Raises:
            ApiError: The key is wrong, or that of a conversation of another step.
        """
        name = self.check(request)
        if name not in self._open:
            raise ApiError(
                401, "invalid_api_key", "the api_key is that of no conversation of this step"
            )
        return self._open[name]


def make_app(gate: Gate, conversations: AgentConversations) -> web.Application:
    """Return the application that serves the conversations of an engine."""

    async def models(request: web.Request) -> web.Response:
        gate.check(request)
        one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "mindspeed_rl"}
        return web.json_response({"object": "list", "data": [one]})

    async def chat(request: web.Request) -> web.StreamResponse:
        conversation = gate.conversation(request)
        asked = parse_request(await request.read())
        is_connected = _connection(request)
        if not asked.stream:
            said = await conversations.complete(conversation, asked, is_connected)
            return web.json_response(said.answer.completion())
        live = conversations.live_turn(asked)
        turn = asyncio.create_task(conversations.complete(conversation, asked, is_connected, live))
        try:
            response, lost = await send_events(request, turn, live, usage=asked.usage)
        finally:
            turn.cancel()  # of a server that closes; else the turn has ended
        if lost is not None:
            conversations.take_back(conversation, lost, asked)
        return response

    app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY_BYTES)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    return app


def _connection(request: web.Request) -> Callable[[], bool]:
    def is_connected() -> bool:
        return request.transport is not None and not request.transport.is_closing()

    return is_connected


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Give refusals, those of the server itself as well, in the form of the API."""
    try:
        response: web.StreamResponse = await handler(request)
    except ApiError as error:
        return web.json_response(error.body, status=error.status)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        refusal = ApiError(
            error.status,
            "not_served",
            f"{request.method} {request.path}: {error.reason}; the endpoint has GET /v1/models and "
            "POST /v1/chat/completions",
        )
        return web.json_response(refusal.body, status=error.status)
    return response
