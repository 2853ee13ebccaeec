"""Real servers on the loopback interface, for tests of the API."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn

from serving.api.app import create_app
from serving.async_engine import AsyncEngine
from serving.deployment import Deployment, ModelService
from serving.engine import Engine, EngineCounters, EngineOptions
from serving.executor.base import Executor
from serving.tokenizer import Tokenizer

MODEL = "tiny"


@dataclass
class TestServer:
    """A server over one engine: its URL, and the engine for looking inside."""

    __test__ = False

    url: str
    service: ModelService
    engine: AsyncEngine

    def counters(self) -> EngineCounters:
        """Counters of the engine."""
        return self.engine.counters()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Poll until `condition` holds; fails naming `what` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {timeout_s:g} s: {what}")
        time.sleep(0.005)


@contextlib.contextmanager
def serve_engine(
    executor: Executor, tokenizer: Tokenizer, options: EngineOptions | None = None
) -> Iterator[TestServer]:
    """A server on a free port over `executor`; it and its engine are gone when the context ends."""
    engine = AsyncEngine(Engine(executor, tokenizer, options))
    service = ModelService(MODEL)
    service.replace(Deployment(engine, tokenizer, digest="d" * 64, kind="golden"))
    try:
        with serve_app(service) as url:
            yield TestServer(url, service, engine)
    finally:
        engine.close()


@contextlib.contextmanager
def serve_app(service: ModelService) -> Iterator[str]:
    """A server on a free port over `service`; yields its URL."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(create_app(service), log_config=None, lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            wait_until(lambda: server.started, "server start")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
