"""The response that runs generation: whole or as server-sent events, and stops it when the client leaves.

It is an ASGI response of its own because the two facts it joins are only visible there: the events of the engine and
the disconnect message of the client. Whatever way it ends, no request of its client is left in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from serving.api.errors import engine_error_body
from serving.api.formats import AnswerFormat, Choice
from serving.api.metrics import ServingMetrics
from serving.async_engine import RequestStream
from serving.engine import TokenEvent
from serving.errors import EngineError


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next_event(stream: RequestStream) -> TokenEvent:
    return await anext(stream)


async def merge_events(
    streams: Sequence[RequestStream], gone: asyncio.Task[None]
) -> AsyncGenerator[tuple[int, TokenEvent], None]:
    """Events of all `streams` as they come, with the stream's index; ends early when the client is `gone`."""
    waiting = {asyncio.create_task(_next_event(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            await asyncio.wait([*waiting, gone], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return
            for task in [task for task in waiting if task.done()]:
                index = waiting.pop(task)
                event = task.result()
                if not streams[index].done:
                    waiting[asyncio.create_task(_next_event(streams[index]))] = index
                yield index, event
    finally:
        for task in waiting:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError):
                await task


class GenerationResponse(Response):
    """Sends what `streams` produce, worded by `answer`, one choice a stream."""

    def __init__(
        self,
        streams: Sequence[RequestStream],
        answer: AnswerFormat,
        metrics: ServingMetrics,
        *,
        streaming: bool,
        include_usage: bool,
    ) -> None:
        super().__init__()
        self._streams = streams
        self._answer = answer
        self._metrics = metrics
        self._streaming = streaming
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run to the end, to the client's leaving or to the engine's failure; then account for every stream."""
        gone = asyncio.create_task(_until_disconnect(receive))
        failed = False
        try:
            if self._streaming:
                failed = await self._send_stream(gone, send)
            else:
                failed = await self._send_whole(gone, scope, receive, send)
        finally:
            gone.cancel()
            for stream in self._streams:
                event = stream.last_event
                outcome = event.finish_reason if event is not None and event.finish_reason is not None else None
                self._metrics.observe(stream, outcome or ("error" if failed else "abort"))
                stream.abort()

    async def _send_whole(self, gone: asyncio.Task[None], scope: Scope, receive: Receive, send: Send) -> bool:
        choices = [Choice() for _ in self._streams]
        try:
            async with contextlib.aclosing(merge_events(self._streams, gone)) as events:
                async for index, event in events:
                    choices[index].add(event)
        except EngineError as error:
            await JSONResponse(engine_error_body(error), 503)(scope, receive, send)
            return True
        if all(stream.done for stream in self._streams):
            await JSONResponse(self._answer.whole(choices))(scope, receive, send)
        return False

    async def _send_stream(self, gone: asyncio.Task[None], send: Send) -> bool:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        seen: set[int] = set()
        failed = False
        try:
            async with contextlib.aclosing(merge_events(self._streams, gone)) as events:
                async for index, event in events:
                    for chunk in self._answer.chunks(index, event, first=index not in seen):
                        await self._send_data(send, chunk)
                    seen.add(index)
        except EngineError as error:
            failed = True
            await self._send_data(send, engine_error_body(error))
        last_events = [stream.last_event for stream in self._streams if stream.last_event is not None]
        if not failed and self._include_usage and all(stream.done for stream in self._streams):
            await self._send_data(send, self._answer.usage_chunk(last_events))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        return failed

    @staticmethod
    async def _send_data(send: Send, data: dict[str, Any]) -> None:
        body = f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})
