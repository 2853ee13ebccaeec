"""The TPOT client: time per output token over HTTP, by a fixed protocol so that figures compare.

Protocol: one warm-up request, then five requests one after another, 48 tokens each at temperature 0, streamed.
`ttft_ms` is from sending the request to its first token; `tpot_ms` is (last token - first token) / (tokens - 1). All
times are the client's own. Ends of sequence are ignored (`ignore_eos`), so every request has its 48 tokens.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from serving.errors import BenchError

WARM_UP_REQUESTS = 1
MEASURED_REQUESTS = 5
TOKENS_PER_REQUEST = 48
DEFAULT_PROMPT = "The lighthouse keeper climbed the stairs once more, and at the top he saw"


@dataclass(frozen=True)
class RequestTiming:
    """Timing of one request in milliseconds, and how many tokens it had."""

    ttft_ms: float
    tpot_ms: float
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class BenchResult:
    """Medians over the measured requests, the raw values, and where they were taken.

    `platform` names what computed (`cpu`, `a2a3`, ...); `executor` is what the server says of its executor (backend,
    instruction set, threads); `machine` is the client's CPU model and usable cores.
    """

    tpot_ms: float
    ttft_ms: float
    requests: tuple[RequestTiming, ...]
    model: str
    digest: str | None
    platform: str
    executor: dict[str, Any]
    machine: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return asdict(self)


def describe_machine() -> dict[str, Any]:
    """CPU model, usable cores and operating system of this host."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "system": platform.platform(terse=True)}


def measure_tpot(
    url: str,
    *,
    platform_name: str | None = None,
    prompt: str = DEFAULT_PROMPT,
    tokens: int = TOKENS_PER_REQUEST,
    requests: int = MEASURED_REQUESTS,
    timeout_s: float = 600.0,
    progress: Callable[[int, int], None] | None = None,
) -> BenchResult:
    """Measure the endpoint at `url` (its root, such as `http://127.0.0.1:8000`).

    `platform_name` defaults to the executor that the server reports. Raises BenchError when the endpoint cannot be
    reached, refuses, or does not give `tokens` tokens.
    """
    if tokens < 2 or requests < 1:
        raise BenchError(f"{requests} requests of {tokens} tokens: at least one request of two tokens is needed")
    try:
        with httpx.Client(base_url=url, timeout=timeout_s) as client:
            health = client.get("/health")
            if health.status_code != 200:
                raise BenchError(f"{url} is not ready: {health.text}")
            facts = health.json()
            timings = []
            for index in range(WARM_UP_REQUESTS + requests):
                timing = _time_request(client, facts["model"], prompt, tokens)
                if index >= WARM_UP_REQUESTS:
                    timings.append(timing)
                if progress is not None:
                    progress(index + 1, WARM_UP_REQUESTS + requests)
    except httpx.HTTPError as error:
        raise BenchError(f"{url} cannot be measured: {type(error).__name__}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{url} does not answer like a pypto-deploy worker: {error!r}") from error
    return BenchResult(
        tpot_ms=statistics.median(timing.tpot_ms for timing in timings),
        ttft_ms=statistics.median(timing.ttft_ms for timing in timings),
        requests=tuple(timings),
        model=facts["model"],
        digest=facts.get("digest"),
        platform=platform_name or facts.get("executor") or "unknown",
        executor=facts.get("executor_details") or {},
        machine=describe_machine(),
    )


def _time_request(client: httpx.Client, model: str, prompt: str, tokens: int) -> RequestTiming:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    arrivals: list[float] = []
    usage: dict[str, int] = {}
    with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise BenchError(f"the endpoint refused the request: {response.read().decode(errors='replace')}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise BenchError(f"the endpoint failed: {chunk['error'].get('message')}")
            if chunk["choices"]:
                arrivals.append(time.perf_counter())
            usage = chunk.get("usage") or usage
    completion = usage.get("completion_tokens", 0)
    if completion != tokens or len(arrivals) != tokens:
        raise BenchError(f"{completion} tokens in {len(arrivals)} chunks came back, {tokens} were asked for")
    return RequestTiming(
        ttft_ms=(arrivals[0] - started) * 1e3,
        tpot_ms=(arrivals[-1] - arrivals[0]) / (completion - 1) * 1e3,
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=completion,
    )
