"""An engine in a thread of its own, for many asyncio clients.

The thread owns the engine: clients only leave commands (submit, abort) and read events from their streams. When the
executor fails, every pending stream gets the error, the engine refuses what comes after, and `failure` says why.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from serving.engine import Engine, EngineCounters, GenerationRequest, TokenEvent
from serving.errors import EngineError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestTimes:
    """Monotonic clock readings in seconds of one request, taken as the client's side of the engine sees them."""

    submitted_s: float
    first_token_s: float | None
    last_token_s: float | None


class RequestStream:
    """The events of one request, in order; belongs to the event loop that submitted it."""

    def __init__(self, engine: AsyncEngine, request: GenerationRequest) -> None:
        self.request = request
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[TokenEvent | EngineError] = asyncio.Queue()
        self._submitted_s = time.monotonic()
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self.done = False
        self.last_event: TokenEvent | None = None

    @property
    def times(self) -> RequestTimes:
        """When the request was submitted and when its tokens came."""
        return RequestTimes(self._submitted_s, self._first_token_s, self._last_token_s)

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        """The next event; raises EngineError when the engine failed, and ends after the finishing event."""
        if self.done:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, EngineError):
            self.done = True
            raise item
        if item.token_id is not None:
            self._last_token_s = time.monotonic()
            self._first_token_s = self._first_token_s or self._last_token_s
        self.last_event = item
        self.done = item.finish_reason is not None
        return item

    def abort(self) -> None:
        """Stop the request unless it is done; calling it again does nothing."""
        if not self.done:
            self.done = True
            self._engine.abort(self.request.request_id)

    def deliver(self, item: TokenEvent | EngineError) -> None:
        """Hand an event over from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:
            # The client's event loop is closed: nobody is left to read.
            logger.debug("request %s has no reader any more", self.request.request_id)


class AsyncEngine:
    """Runs an Engine's steps in a thread; safe to use from any thread and event loop."""

    def __init__(self, engine: Engine) -> None:
        """Start the thread at once; the engine and its executor belong to it until `close`."""
        self.engine = engine
        self.failure: str | None = None
        self._condition = threading.Condition()
        self._submitted: list[RequestStream] = []
        self._aborted: list[str] = []
        self._streams: dict[str, RequestStream] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def active_requests(self) -> int:
        """Requests submitted and neither finished nor aborted yet."""
        with self._condition:
            return len(self._streams)

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queue a request; RequestError when it can never be served, EngineError when the engine has stopped."""
        self.engine.check(request.prompt_ids)
        stream = RequestStream(self, request)
        with self._condition:
            if self.failure is not None or self._closing:
                raise EngineError(self.failure or "the engine is stopping")
            if request.request_id in self._streams:
                raise EngineError(f"request id {request.request_id} is in use")
            self._streams[request.request_id] = stream
            self._submitted.append(stream)
            self._condition.notify()
        return stream

    def abort(self, request_id: str) -> None:
        """Stop a request after the running step; nothing happens when it is finished."""
        with self._condition:
            if self._streams.pop(request_id, None) is not None:
                self._aborted.append(request_id)
                self._condition.notify()

    def counters(self) -> EngineCounters:
        """Engine counters; may be a step behind while one is running."""
        return self.engine.counters()

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop after the running step, fail what is pending, and close the executor; blocks until done.

        Returns False when the running step has not returned after `timeout_s` seconds.
        """
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            # The boundary of the thread: whatever the executor raised must reach the clients, not die in silence.
            logger.exception("the engine failed")
            self._fail_all(f"the engine failed: {type(error).__name__}: {error}")
        else:
            self._fail_all("the engine is stopping")
        finally:
            self.engine.executor.close()

    def _loop(self) -> None:
        while True:
            with self._condition:
                while not (self._closing or self._submitted or self._aborted or self.engine.has_work):
                    self._condition.wait()
                if self._closing:
                    return
                submitted, self._submitted = self._submitted, []
                aborted, self._aborted = self._aborted, []
            for stream in submitted:
                self.engine.add(stream.request)
            for request_id in aborted:
                self.engine.abort(request_id)
            self._dispatch(self.engine.step())

    def _dispatch(self, events: list[TokenEvent]) -> None:
        for event in events:
            with self._condition:
                stream = self._streams.get(event.request_id)
                if stream is not None and event.finish_reason is not None:
                    del self._streams[event.request_id]
            if stream is not None:
                stream.deliver(event)

    def _fail_all(self, reason: str) -> None:
        with self._condition:
            self.failure = reason
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.deliver(EngineError(reason))
