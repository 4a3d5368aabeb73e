"""Sends a turn of the model as server-sent events, while the engine samples it."""

from __future__ import annotations

import asyncio

from aiohttp import web

from mindspeed_rl.endpoint.answers import END_OF_STREAM
from mindspeed_rl.endpoint.conversations import SaidTurn
from mindspeed_rl.endpoint.live import LiveTurn
from mindspeed_rl.endpoint.requests import ApiError

_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


async def send_events(
    request: web.Request, turn: asyncio.Task[SaidTurn], live: LiveTurn, *, usage: bool
) -> tuple[web.StreamResponse, SaidTurn | None]:
    """Send a turn to its client while it is sampled; with ``usage`` its numbers of tokens.

    Returns:
        The response, and the turn if the client had gone before it had all of it.

    Raises:
        ApiError: The turn is refused before anything of it was sent.
    """
    response = web.StreamResponse(headers=_HEADERS)
    try:
        async for text in live.pieces(turn):
            assert live.head is not None, "tokens of a turn that has not begun"
            if not response.prepared:
                await response.prepare(request)
                await response.write(live.head.opening(usage=usage))
            if text:
                await response.write(live.head.event({"content": text}, usage=usage))
        said = await turn
        if not response.prepared:
            await response.prepare(request)
            await response.write(said.answer.head.opening(usage=usage))
        for event in said.answer.rest(live.shown, usage=usage):
            await response.write(event)
        await response.write_eof()
    except ConnectionError:  # the client has gone; the engine goes on, and the client may ask again
        return response, await _unless_refused(turn)
    except ApiError as error:
        if not response.prepared:
            raise
        await _send_refusal(response, error)
    return response, None


async def _unless_refused(turn: asyncio.Task[SaidTurn]) -> SaidTurn | None:
    try:
        return await turn
    except ApiError:  # nobody is there to read it
        return None


async def _send_refusal(response: web.StreamResponse, error: ApiError) -> None:
    """End a stream whose turn was refused after its first events, in the form of the API."""
    try:
        await response.write(error.event)
        await response.write(END_OF_STREAM)
        await response.write_eof()
    except ConnectionError:
        return
