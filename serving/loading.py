"""From a bundle on disk to a deployment that has proved it can answer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from dataclasses import dataclass, field
from typing import Any

from serving.async_engine import AsyncEngine
from serving.bundle import Bundle, verify_bundle
from serving.deployment import Deployment
from serving.engine import Engine, EngineOptions, GenerationRequest
from serving.errors import BundleError, EngineError
from serving.executor import DEFAULT_NUM_PAGES, Executor, ExecutorKind, open_executor
from serving.executor.cpu import CpuExecutor
from serving.sampling_params import SamplingParams
from serving.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 2


@dataclass(frozen=True)
class LoadOptions:
    """How to load a bundle: which executor, its KV cache in pages, its threads (None: its own choice), its KV format.

    With `verify` everything in the bundle is hashed first, so that a damaged one never comes up.
    """

    kind: ExecutorKind = "cpu"
    num_pages: int = DEFAULT_NUM_PAGES
    threads: int | None = None
    kv: str = "bf16"
    verify: bool = True
    engine: EngineOptions = field(default_factory=EngineOptions)


def load_deployment(bundle: Bundle, options: LoadOptions) -> Deployment:
    """Load `bundle` and start its engine; blocks. Raises a ServingError or KernelsError that says what is wrong."""
    if options.verify:
        problems = verify_bundle(bundle.path)
        if problems:
            raise BundleError(f"bundle {bundle.digest} is damaged", problems)
    tokenizer = Tokenizer.load(bundle.checkpoint_dir)
    executor = open_executor(bundle.slabs_dir, options.kind, options.num_pages, options.threads, options.kv)
    engine = AsyncEngine(Engine(executor, tokenizer, options.engine))
    logger.info("loaded bundle %s on executor %s", bundle.digest, options.kind)
    return Deployment(engine, tokenizer, bundle.digest, options.kind, describe_executor(executor))


def describe_executor(executor: Executor) -> dict[str, Any]:
    """What a figure measured on `executor` should carry: backend, instruction set, threads; empty for other kinds."""
    if not isinstance(executor, CpuExecutor):
        return {}
    return {
        "backend": executor.backend,
        "instruction_set": executor.instruction_set,
        "threads": executor.threads,
        "kv": executor.kv,
    }


async def warm_up(deployment: Deployment) -> None:
    """Generate two tokens, so that prefill and decode have run once; EngineError when that fails."""
    request = GenerationRequest(
        "warm-up", (0,), SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0.0, ignore_eos=True)
    )
    async for _ in deployment.engine.submit(request):
        pass


async def bring_up(bundle: Bundle, options: LoadOptions, timeout_s: float) -> Deployment:
    """Load and warm up within `timeout_s` seconds, without blocking the event loop.

    Raises EngineError when the time is over, and whatever `load_deployment` and `warm_up` raise; nothing keeps running
    then, except a load that hangs, whose result is closed as soon as it comes.
    """
    loading = _start_loading(bundle, options)
    try:
        async with asyncio.timeout(timeout_s):
            deployment = await asyncio.shield(asyncio.wrap_future(loading))
            try:
                await warm_up(deployment)
            except BaseException:
                # Also on a timeout or cancellation: the new engine must not stay behind.
                await asyncio.to_thread(deployment.engine.close)
                raise
    except TimeoutError as error:
        loading.add_done_callback(_close_late)
        raise EngineError(f"bundle {bundle.digest} did not come up within {timeout_s:g} s") from error
    except asyncio.CancelledError:
        loading.add_done_callback(_close_late)
        raise
    return deployment


def _start_loading(bundle: Bundle, options: LoadOptions) -> concurrent.futures.Future[Deployment]:
    """Load in a daemon thread: a pool's thread would keep the process from ending while a load hangs."""
    future: concurrent.futures.Future[Deployment] = concurrent.futures.Future()

    def load() -> None:
        try:
            future.set_result(load_deployment(bundle, options))
        except BaseException as error:  # noqa: BLE001 - handed over whole to whoever waits for the load
            future.set_exception(error)

    threading.Thread(target=load, name="load", daemon=True).start()
    return future


def _close_late(loading: concurrent.futures.Future[Deployment]) -> None:
    error = loading.exception()
    if error is not None:
        logger.warning("a load given up earlier failed: %s", error)
    else:
        loading.result().engine.close()
