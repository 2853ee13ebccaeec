"""The worker as a process: start, switch without dropping requests, failing bundles, recovery, graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serving.bundle import BundleParts
from serving.errors import EngineError, ExecutorError, ServingError, StoreError, SwitchError
from serving.loading import LoadOptions, bring_up
from serving.store import BundleStore
from serving.switch import await_switch
from serving.worker import Worker, WorkerOptions, _listen, serve
from serving.worker_registry import live_workers
from tests.serving.bundles import evidence_of, flip_byte
from tests.serving.http_server import wait_until

LOAD = LoadOptions(num_pages=32)
BODY: dict[str, Any] = {"model": "tiny", "prompt": "the sea", "seed": 1, "max_tokens": 16, "ignore_eos": True}
LONG = 2000
LONG_STREAMS = 4


def put(store: BundleStore, parts: BundleParts) -> str:
    return store.put(parts, evidence_of(parts)).digest


@contextlib.contextmanager
def start_worker(store: BundleStore, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A worker process that answers; its exit is the test's business, but it never outlives the context."""
    ready = store.root / "ready.json"
    command = [sys.executable, "-m", "serving.worker", "--store", str(store.root), "--port", "0"]
    command += ["--num-pages", "80", "--poll", "0.05", "--ready-file", str(ready), *arguments]
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, "worker ready", timeout_s=60)
        assert process.poll() is None, "the worker ended early"
        yield process, json.loads(ready.read_text())["url"]
    finally:
        process.kill()
        process.wait()


def complete(url: str, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/completions", json={**BODY, **fields}, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text_of(url: str, **fields: Any) -> str:
    text: str = complete(url, **fields)["choices"][0]["text"]
    return text


def finished_requests(url: str) -> float:
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith('pypto_deploy_requests_total{outcome="length"}'):
            return float(line.split()[-1])
    return 0.0


def test_case_27_switches_and_failures_seen_by_clients(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    first, second, broken = (put(store, parts) for parts in tiny_parts[:3])
    flip_byte(store.bundle_path(broken) / "slabs" / "slabs.safetensors")
    store.promote(first, reason="release")
    with start_worker(store) as (process, url):
        health = httpx.get(f"{url}/health").json()
        assert health["digest"] == first
        assert health["executor_details"]["threads"] >= 1
        (worker,) = live_workers(store.root)
        assert (worker.pid, worker.url, worker.state, worker.digest) == (process.pid, url, "ready", first)
        old_text, old_long = text_of(url), text_of(url, max_tokens=LONG)

        # Requests that run across the switch are finished by the bundle that began them.
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            long: dict[str, Any] = {"model": "tiny", "prompt": "the sea", "seed": 1, "max_tokens": LONG}
            streams = [
                client.completions.create(**long, stream=True, extra_body={"ignore_eos": True})
                for _ in range(LONG_STREAMS)
            ]
            firsts = [next(stream).choices[0].text for stream in streams]
            store.promote(second, reason="release")
            await_switch(store, second, timeout_s=60)
            assert finished_requests(url) == 2, "the long requests should still be running"
            new_text = text_of(url)
            for first_text, stream in zip(firsts, streams, strict=True):
                assert first_text + "".join(chunk.choices[0].text for chunk in stream) == old_long
        assert new_text != old_text
        assert httpx.get(f"{url}/health").json()["digest"] == second

        # A damaged bundle changes nothing for clients and sends the alias back.
        store.promote(broken, reason="release")
        with pytest.raises(SwitchError, match="damaged"):
            await_switch(store, broken, timeout_s=60)
        wait_until(lambda: store.alias("champion") == second, "alias back")
        move = store.history("champion")[-1]
        assert (move.kind, move.previous) == ("rollback", broken)
        assert "could not take up" in move.reason
        health = httpx.get(f"{url}/health").json()
        assert (health["status"], health["digest"]) == ("ok", second)
        assert text_of(url) == new_text
        (worker,) = live_workers(store.root)
        assert (worker.state, worker.digest, worker.failed_digest) == ("ready", second, broken)
        assert httpx.get(f"{url}/admin/status").json()["worker"]["failed_digest"] == broken

        # A rollback is a switch like any other.
        assert store.rollback(reason="second thoughts").digest == first
        await_switch(store, first, timeout_s=60)
        assert text_of(url) == old_text
        with pytest.raises(StoreError):
            store.rollback()

        # SIGTERM lets a running request finish.
        results: list[str] = []
        thread = threading.Thread(target=lambda: results.append(text_of(url, max_tokens=LONG)))
        before = httpx.get(f"{url}/admin/status").json()["engine"]["requests_added"]
        thread.start()
        wait_until(
            lambda: httpx.get(f"{url}/admin/status").json()["engine"]["requests_added"] > before, "running request"
        )
        process.send_signal(signal.SIGTERM)
        thread.join()
        assert results == [old_long]
        assert process.wait(timeout=30) == 0
    assert live_workers(store.root) == []
    assert list((store.root / "workers").iterdir()) == []


def test_streamed_tokens_are_not_held_back_by_the_socket() -> None:
    async def accepted_socket_option() -> int:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answer.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with _listen("127.0.0.1", 0) as listener:
            server = await asyncio.start_server(accept, sock=listener)
            _, writer = await asyncio.open_connection(*listener.getsockname())
            option = await answer
            writer.close()
            server.close()
            await server.wait_closed()
        return option

    assert asyncio.run(accepted_socket_option()) != 0


def test_a_taken_port_is_refused_by_name(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    digest = put(store, tiny_parts[0])
    with _listen("127.0.0.1", 0) as listener:
        listener.listen()
        with pytest.raises(ServingError, match=f"port {listener.getsockname()[1]}"):
            serve(digest, store.root, port=listener.getsockname()[1])
    assert live_workers(store.root) == []


def test_stop_does_not_wait_for_ever(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    store.promote(put(store, tiny_parts[0]))
    with start_worker(store, "--stop-timeout", "1", "--ref", "champion") as (process, url):
        body = {"model": "tiny", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=60) as client, contextlib.suppress(httpx.HTTPError):
            requests = [client.stream("POST", f"{url}/v1/completions", json=body) for _ in range(8)]
            with contextlib.ExitStack() as stack:
                for request in requests:
                    stack.enter_context(request)
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=30) == 0


def test_bad_starts_exit_with_a_message_and_leave_no_record(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    broken = put(store, tiny_parts[0])
    flip_byte(store.bundle_path(broken) / "slabs" / "slabs.safetensors")
    for reference, code, message in (("nothing", 2, "no alias"), (broken, 1, "damaged")):
        command = [sys.executable, "-m", "serving.worker", "--store", str(store.root), "--port", "0"]
        done = subprocess.run([*command, "--ref", reference], capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
    assert live_workers(store.root) == []


def test_worker_recovers_from_a_failed_engine(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    digest = put(store, tiny_parts[0])
    store.promote(digest)
    worker = Worker(WorkerOptions(store.root, "champion", load=LOAD, poll_s=0.02))

    async def scenario() -> None:
        model = asyncio.create_task(worker._keep_model("http://none"))
        await until(lambda: worker.service.deployment is not None)
        broken = worker.service.require()

        def fail(batch: object) -> Any:
            raise ExecutorError("the executor process was killed")

        broken.engine.engine.executor.forward = fail  # type: ignore[method-assign]
        await until(lambda: broken.engine.failure is not None or not submit(broken))
        await until(lambda: worker.service.deployment is not broken)
        assert worker.service.problem() is None
        assert worker.service.require().digest == digest
        model.cancel()
        worker.service.require().engine.close()

    def submit(deployment: Any) -> bool:
        from serving.engine import GenerationRequest
        from serving.sampling_params import SamplingParams

        with contextlib.suppress(EngineError):
            deployment.engine.submit(GenerationRequest(str(time.monotonic()), (5,), SamplingParams(max_tokens=1)))
        return True

    asyncio.run(scenario())


async def until(condition: Any, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_load_that_takes_too_long_is_given_up_and_closed(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    bundle = store.resolve(put(store, tiny_parts[0]))
    with pytest.raises(EngineError, match="did not come up within 0 s"):
        asyncio.run(bring_up(bundle, LOAD, timeout_s=0.0))
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name in ("load", "engine")], "late load closed", timeout_s=30
    )


def test_worker_serves_a_folder_without_following_anything(
    store: BundleStore, tiny_parts: list[BundleParts], tmp_path: Path
) -> None:
    first, second = (put(store, parts) for parts in tiny_parts[:2])
    path = store.bundle_path(first)
    worker = Worker(WorkerOptions(store.root, str(path), load=LOAD, served_model_name="mine", poll_s=0.02))

    async def scenario() -> None:
        model = asyncio.create_task(worker._keep_model("http://none"))
        await until(lambda: worker.service.deployment is not None)
        store.promote(second)
        await asyncio.sleep(0.2)
        assert worker.service.require().digest == first
        assert worker.service.served_model_name == "mine"
        model.cancel()
        worker.service.require().engine.close()

    asyncio.run(scenario())
