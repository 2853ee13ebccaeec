"""The serving worker: one process, one model at a time, following an alias of the store.

    python -m serving.worker --store DIR --ref champion --port 8000

The API is up before the model is, and says so in `/health`. When `--ref` is an alias, the worker watches it: a new
bundle is loaded beside the old one, warmed up, and given all new requests, while the old one finishes its own. A bundle
that does not come up changes nothing for clients: the old one stays, the failure is recorded in the worker's record,
and the alias goes back, with the reason in the store's history.

SIGTERM and SIGINT stop it gracefully: no new requests, running ones finish or time out, exit code 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import uvicorn

from kernels.errors import KernelsError
from kernels.kv_format import KV_FORMATS
from serving.alias_history import AliasMove
from serving.api.app import create_app
from serving.bundle import Bundle
from serving.deployment import Deployment, ModelService
from serving.errors import ServingError, StoreError
from serving.executor import DEFAULT_NUM_PAGES, ExecutorKind
from serving.files import write_text_atomic
from serving.loading import LoadOptions, bring_up
from serving.store import BundleStore
from serving.worker_registry import WorkerRecord, WorkerRegistration, register

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class WorkerOptions:
    """What to serve, from where, and under which name; port 0 takes a free one.

    `ready_file` is written once requests are answered: `{"url", "pid", "digest"}`. Times are in seconds:
    `load_timeout_s` for a bundle to come up, `drain_timeout_s` for requests of a replaced bundle, `stop_timeout_s` for
    running requests at the end, `poll_s` between looks at the alias.
    """

    store_root: Path
    ref: str
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    load: LoadOptions = field(default_factory=LoadOptions)
    ready_file: Path | None = None
    load_timeout_s: float = 600.0
    drain_timeout_s: float = 600.0
    stop_timeout_s: int = 30
    poll_s: float = 0.5


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the worker: uvicorn re-raises them and would spoil the exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


class Worker:
    """Joins store, service and HTTP server for the life of a process."""

    def __init__(self, options: WorkerOptions) -> None:
        """Resolve what to serve; StoreError or BundleError when there is no such bundle."""
        self._options = options
        self._store = BundleStore(options.store_root)
        # Read before the alias is resolved: a move in between is then noticed, not lost.
        self._seen_move = self._last_sequence()
        self._first: Bundle = self._store.resolve(options.ref)
        self._follows = options.ref if self._seen_move is not None else None
        self.service = ModelService(options.served_model_name or self._first.name)
        self._registration: WorkerRegistration | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._retry_s = FIRST_RETRY_S
        self._retry_at_s = 0.0

    async def run(self) -> int:
        """Serve until a signal; returns the exit code."""
        options = self._options
        with _listen(options.host, options.port) as listener, contextlib.ExitStack() as stack:
            url = _url(options.host, listener)
            record = WorkerRecord(
                pid=os.getpid(),
                url=url,
                ref=options.ref,
                alias=self._follows,
                served_model_name=self.service.served_model_name,
                executor=options.load.kind,
                state="starting",
            )
            self._registration = stack.enter_context(register(self._store.root, record))
            server = _Server(
                uvicorn.Config(
                    create_app(self.service, self._status),
                    log_config=None,
                    access_log=False,
                    ws="none",
                    lifespan="off",
                    timeout_graceful_shutdown=options.stop_timeout_s,
                )
            )
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop.set)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            model = asyncio.create_task(self._keep_model(url))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait([serving, model, stopping], return_when=asyncio.FIRST_COMPLETED)
            self._registration.update(state="stopping")
            server.should_exit = True
            await serving
            code = await self._stop_model(model)
            stopping.cancel()
        return code

    async def _keep_model(self, url: str) -> None:
        """Bring the first bundle up, then follow the alias for ever; a failing first load ends it with its error."""
        options = self._options
        deployment = await bring_up(self._first, options.load, options.load_timeout_s)
        self.service.replace(deployment)
        self._update(state="ready", digest=deployment.digest)
        logger.info("serving %s (%s) at %s", self.service.served_model_name, deployment.digest, url)
        if options.ready_file is not None:
            ready = {"url": url, "pid": os.getpid(), "digest": deployment.digest}
            write_text_atomic(options.ready_file, json.dumps(ready))
        while True:
            await asyncio.sleep(options.poll_s)
            await self._look_at_alias()
            await self._look_at_health()

    async def _look_at_alias(self) -> None:
        """Take up what the alias names now, when it has moved."""
        if self._follows is None:
            return
        try:
            move = self._store.last_move(self._follows)
        except (StoreError, OSError) as error:
            logger.warning("cannot read the store's history, keeping the present bundle: %s", error)
            return
        if move is None or move.sequence == self._seen_move:
            return
        self._seen_move = move.sequence
        present = self.service.deployment
        if present is not None and present.digest == move.digest and present.engine.failure is None:
            self._update(state="ready", digest=present.digest)
            return
        await self._switch(move)

    async def _look_at_health(self) -> None:
        """Load the present bundle again when its engine has failed, less and less often while that does not help."""
        failed = self.service.deployment
        if failed is None or failed.engine.failure is None or time.monotonic() < self._retry_at_s:
            return
        self._update(state="failed", error=failed.engine.failure)
        try:
            bundle = self._store.resolve(failed.digest) if self._follows is not None else self._first
            deployment = await bring_up(bundle, self._options.load, self._options.load_timeout_s)
        except (ServingError, KernelsError, OSError, MemoryError) as error:
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            self._retry_at_s = time.monotonic() + self._retry_s
            logger.error("bundle %s does not come up again, next try in %g s: %s", failed.digest, self._retry_s, error)
            self._update(error=f"{failed.engine.failure}; it does not come up again: {error}")
            return
        self._retry_s = FIRST_RETRY_S
        self.service.replace(deployment)
        self._update(state="ready", error=None)
        logger.info("recovered: bundle %s serves again", deployment.digest)

    async def _switch(self, move: AliasMove) -> None:
        """Bring the bundle of `move` up beside the present one and hand over; on failure move the alias back."""
        options = self._options
        self._update(state="switching")
        try:
            bundle = self._store.resolve(move.digest)
            deployment = await bring_up(bundle, options.load, options.load_timeout_s)
        except (ServingError, KernelsError, OSError, MemoryError) as error:
            logger.error("bundle %s did not come up, keeping the present one: %s", move.digest, error)
            self._move_back(move, f"{type(error).__name__}: {error}")
            return
        old = self.service.replace(deployment)
        self._update(state="ready", digest=deployment.digest, error=None, failed_digest=None, failed_move=None)
        logger.info("switched to bundle %s", deployment.digest)
        if old is not None:
            task = asyncio.create_task(self._retire(old))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    def _move_back(self, move: AliasMove, reason: str) -> None:
        try:
            # Only if nobody else has moved the alias meanwhile: another worker may have failed on it first.
            back = self._store.move_back(move, f"worker {os.getpid()} could not take up {move.digest}: {reason}")
        except (StoreError, OSError) as error:
            logger.error("the alias was not moved back: %s", error)
        else:
            logger.warning("moved %s back to %s", back.alias, back.digest)
        self._update(state="ready", error=reason, failed_digest=move.digest, failed_move=move.sequence)

    async def _retire(self, deployment: Deployment) -> None:
        if not await deployment.drain(self._options.drain_timeout_s):
            logger.warning("requests of bundle %s took too long and are cut off", deployment.digest)
        await asyncio.to_thread(deployment.engine.close)
        logger.info("retired bundle %s", deployment.digest)

    async def _stop_model(self, model: asyncio.Task[None]) -> int:
        """End the model's task and engines; the exit code tells whether the model had come up."""
        code = EXIT_OK
        if model.done():
            error = model.exception()
            if not isinstance(error, ServingError | KernelsError | OSError | MemoryError):
                raise error if error is not None else RuntimeError("the model's task ended by itself")
            logger.error("bundle %s did not come up: %s", self._first.digest, error)
            self._update(state="failed", error=str(error), failed_digest=self._first.digest)
            code = EXIT_FAILED
        else:
            model.cancel()
            await asyncio.wait([model])
        for task in self._background:
            task.cancel()
        deployment = self.service.deployment
        if deployment is not None and not await asyncio.to_thread(deployment.engine.close, CLOSE_TIMEOUT_S):
            logger.error("the executor does not return from its step; ending without it")
            code = EXIT_FAILED
        return code

    def _last_sequence(self) -> int | None:
        move = self._store.last_move(self._options.ref)
        return move.sequence if move else None

    def _update(self, **changes: Any) -> None:
        if self._registration is not None:
            self._registration.update(**changes)

    def _status(self) -> dict[str, Any]:
        return self._registration.record.model_dump() if self._registration is not None else {}


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket; made here, and not by the server, so that port 0 is known before it is announced."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only on sockets that say TCP; left on, every
    # streamed token waits some 40 ms for the client's acknowledgement of the one before.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ServingError(f"cannot listen on {host} port {port}: {error.strerror}; choose another") from error
        yield listener


def _url(host: str, listener: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def run_worker(options: WorkerOptions) -> int:
    """Run a worker in this process until it is told to stop; returns the exit code. Call from the main thread."""
    return asyncio.run(Worker(options).run())


def serve(
    ref: str,
    store_root: Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    kind: ExecutorKind = "cpu",
    kv: str = "bf16",
) -> int:
    """Serve `ref` (an alias, which is followed, a digest or a bundle folder) until told to stop; returns the exit code.

    Raises ServingError before anything is served when `ref` means nothing or the port is taken.
    """
    options = WorkerOptions(store_root, ref, host, port, served_model_name, LoadOptions(kind=kind, kv=kv))
    return run_worker(options)


def parse_arguments(arguments: Sequence[str]) -> WorkerOptions:
    """Options from a command line."""
    parser = argparse.ArgumentParser(prog="python -m serving.worker", description="Serve a bundle over HTTP.")
    parser.add_argument("--store", type=Path, required=True, help="folder of the bundle store")
    parser.add_argument("--ref", default="champion", help="alias (followed), digest or bundle folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free port")
    parser.add_argument("--served-model-name", help="name in the API (default: the bundle's)")
    parser.add_argument("--executor", choices=get_args(ExecutorKind), default="cpu")
    parser.add_argument("--num-pages", type=int, default=DEFAULT_NUM_PAGES, help="KV cache pages of 128 tokens")
    parser.add_argument("--threads", type=int, help="threads of the executor")
    parser.add_argument("--kv", choices=KV_FORMATS, default="bf16", help="how the cache keeps keys and values")
    parser.add_argument("--no-verify", action="store_true", help="do not hash the bundle before loading it")
    parser.add_argument("--ready-file", type=Path, help="written once requests are answered")
    parser.add_argument("--load-timeout", type=float, default=600.0, help="seconds for a bundle to come up")
    parser.add_argument("--poll", type=float, default=0.5, help="seconds between looks at the alias")
    parser.add_argument("--stop-timeout", type=int, default=30, help="seconds for running requests at the end")
    values = parser.parse_args(arguments)
    return WorkerOptions(
        store_root=values.store,
        ref=values.ref,
        host=values.host,
        port=values.port,
        served_model_name=values.served_model_name,
        load=LoadOptions(
            kind=values.executor,
            num_pages=values.num_pages,
            threads=values.threads,
            kv=values.kv,
            verify=not values.no_verify,
        ),
        ready_file=values.ready_file,
        load_timeout_s=values.load_timeout,
        poll_s=values.poll,
        stop_timeout_s=values.stop_timeout,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m serving.worker`."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        return run_worker(options)
    except ServingError as error:
        logger.error("%s", error)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
