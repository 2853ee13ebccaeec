"""Ask a released bundle something over HTTP, as any client would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx

from flows import console
from flows.settings import Store
from serving.errors import ServingError
from serving.launch import launched_worker
from serving.worker_registry import live_workers

ANSWER_TOKENS = 64
_TIMEOUT_S = 120.0


def ask_worker(
    store: Store, digest: str, prompts: list[str], show: Callable[[str], None] | None
) -> list[dict[str, Any]]:
    """Put `prompts` to a worker that serves `digest`, streamed; returns prompts with their answers.

    A live worker of the store is used when one serves the bundle; otherwise one is started and stopped again.
    `show` gets the text as it comes.
    """
    running = [worker.url for worker in live_workers(store.root) if worker.digest == digest and worker.state == "ready"]
    if running:
        return _ask_all(running[0], prompts, show)
    with ExitStack() as stack:
        with console.current().step("start worker") as line:
            worker = stack.enter_context(launched_worker(store.root, digest))
            line.outcome = worker.url
        return _ask_all(worker.url, prompts, show)


def _ask_all(url: str, prompts: list[str], show: Callable[[str], None] | None) -> list[dict[str, Any]]:
    answers = []
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        for prompt in prompts:
            if show:
                show(f"\n> {prompt}\n")
            pieces = []
            for piece in _stream(client, model, prompt):
                pieces.append(piece)
                if show:
                    show(piece)
            if show:
                show("\n")
            answers.append({"prompt": prompt, "answer": "".join(pieces)})
    return answers


def _stream(client: httpx.Client, model: str, prompt: str) -> Iterator[str]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise ServingError(f"the worker refused {prompt!r}: {response.read().decode(errors='replace')}")
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ServingError(f"the worker failed on {prompt!r}: {event['error'].get('message')}")
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""
