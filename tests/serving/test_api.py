"""The HTTP API on real servers, with the official client: shapes, streams, limits, errors, leaving clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kernels.staging import stage_checkpoint
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
from serving.bench import BenchResult, measure_tpot
from serving.deployment import ModelService
from serving.engine import EngineOptions, is_idle
from serving.errors import BenchError, ExecutorError
from serving.executor import open_executor
from serving.executor.base import Chunk
from serving.tokenizer import Tokenizer
from tests.serving.golden_executor import GoldenExecutor, ScriptedExecutor
from tests.serving.http_server import MODEL, TestServer, serve_app, serve_engine, wait_until
from tests.tiny_models import EOS_ID, byte_tokenizer, make_tiny_qwen3

TOKENIZER = Tokenizer(byte_tokenizer())
CHAT: list[Any] = [{"role": "user", "content": "tell me of the sea"}]


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    with serve_engine(GoldenExecutor(num_pages=32), TOKENIZER) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: TestServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(server: TestServer, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, str) else json.dumps(body)
    return httpx.post(server.url + path, content=content, headers={"content-type": "application/json"}, timeout=200)


def complete(server: TestServer, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 8, **fields}
    response = post(server, "/v1/completions", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(server: TestServer, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = post(server, path, body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_completion_with_the_openai_client(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="the sea", max_tokens=12, temperature=0)
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.choices[0].finish_reason in ("stop", "length")
    stream = client.completions.create(
        model=MODEL,
        prompt="the sea",
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat_with_the_openai_client(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, max_completion_tokens=12, temperature=0)
    message = whole.choices[0].message
    assert message.role == "assistant"
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_chat_template_and_prompt_agree(server: TestServer, client: openai.OpenAI) -> None:
    ids = TOKENIZER.encode_chat(CHAT)
    plain = complete(server, ids, max_tokens=10, return_token_ids=True)
    extra = {"ignore_eos": True, "return_token_ids": True}
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=10, temperature=0, extra_body=extra
    ).model_dump()
    assert chat["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert len(plain["choices"][0]["token_ids"]) == 10


def test_logprobs(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob < 0
    plain = client.completions.create(model=MODEL, prompt="the sea", max_tokens=4, temperature=0, logprobs=1)
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.tokens is not None
    assert len(plain.choices[0].logprobs.tokens) == 4


def test_several_prompts_are_several_choices(server: TestServer) -> None:
    prompts = ["the sea", "a storm", "the keeper"]
    together = complete(server, prompts)
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    assert [c["text"] for c in together["choices"]] == [complete(server, p)["choices"][0]["text"] for p in prompts]
    assert together["usage"]["completion_tokens"] == 24
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "ignore_eos": True, "max_tokens": 8, "stream": True}
    texts = ["", "", ""]
    for line in post(server, "/v1/completions", body).text.splitlines():
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in together["choices"]]


def test_same_seed_same_text_alone_or_in_a_crowd(server: TestServer) -> None:
    fields = {"temperature": 1.0, "top_p": 0.95, "seed": 7, "max_tokens": 20, "return_token_ids": True}
    alone = complete(server, "the sea", **fields)["choices"][0]["token_ids"]
    crowd: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda n=n: crowd.append(complete(server, f"noise {n}", max_tokens=40, temperature=1)))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    assert complete(server, "the sea", **fields)["choices"][0]["token_ids"] == alone
    for thread in threads:
        thread.join()
    assert len(crowd) == 4


def test_case_17_shapes_of_stop_and_content(server: TestServer) -> None:
    def chat(content: Any, **fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}

    assert complete(server, "the sea", stop="zzz")["choices"][0]["finish_reason"] == "length"
    parts = [{"type": "text", "text": "tell me "}, {"type": "text", "text": "of the sea"}]
    joined = post(server, "/v1/chat/completions", chat(parts, temperature=0)).json()
    plain = post(server, "/v1/chat/completions", chat("tell me of the sea", temperature=0)).json()
    assert joined["choices"] == plain["choices"]
    assert joined["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    assert "image_url" in refused(server, "/v1/chat/completions", chat(image))["message"]
    assert refused(server, "/v1/chat/completions", chat(None))["param"] == "messages[0].content"
    assert refused(server, "/v1/chat/completions", chat("x", stop=[""]))["param"] == "stop"


def test_case_18_max_tokens(server: TestServer) -> None:
    assert complete(server, "the sea", max_tokens=None)["usage"]["completion_tokens"] == 16
    zero = complete(server, "the sea", max_tokens=0)
    assert zero["choices"][0]["text"] == ""
    assert zero["choices"][0]["finish_reason"] == "length"
    assert zero["usage"]["completion_tokens"] == 0
    error = refused(server, "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": -1})
    assert error["param"] == "max_tokens"
    ids = [5] * 1020
    capped = complete(server, ids, max_tokens=10**9)
    assert capped["choices"][0]["finish_reason"] == "length"
    assert capped["usage"]["completion_tokens"] == 5
    exact = complete(server, [5] * 1024, max_tokens=9)
    assert (exact["choices"][0]["finish_reason"], exact["usage"]["completion_tokens"]) == ("length", 1)
    error = refused(server, "/v1/completions", {"model": MODEL, "prompt": [5] * 1025})
    assert "1025" in error["message"]
    assert "1024" in error["message"]
    assert error["code"] == "context_length_exceeded"


def test_case_19_bad_prompts_do_not_harm_a_neighbour(server: TestServer) -> None:
    expected = complete(server, "a neighbour", max_tokens=100)["choices"][0]["text"]
    answers: list[str] = []
    neighbour = threading.Thread(
        target=lambda: answers.append(complete(server, "a neighbour", max_tokens=100)["choices"][0]["text"])
    )
    neighbour.start()
    body = {"model": MODEL, "max_tokens": 4}
    for prompt, part in (([0, 5, 10**12], "1000000000000"), ([-1], "-1"), ([], "empty"), ("", "empty")):
        error = refused(server, "/v1/completions", {**body, "prompt": prompt})
        assert part in error["message"]
        assert error["type"] == "invalid_request_error"
        if prompt and part != "empty":
            assert "319" in error["message"]
    neighbour.join()
    assert answers == [expected]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x", "n": 2}, "n"),
        ("/v1/completions", {"prompt": "x", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "x", "temperature": "hot"}, "temperature"),
        ("/v1/completions", {"prompt": "x", "temperature": 3}, "temperature"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "no_such_field": 1}, "no_such_field"),
        ("/v1/completions", {"prompt": [True]}, "prompt"),
        ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]}, "tools"),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ],
)
def test_requests_that_cannot_be_honoured_name_the_field(
    server: TestServer, path: str, fields: dict[str, Any], param: str
) -> None:
    assert refused(server, path, {"model": MODEL, **fields})["param"] == param


def test_unknown_model_and_path_and_broken_json(server: TestServer, client: openai.OpenAI) -> None:
    assert refused(server, "/v1/completions", {"model": "other", "prompt": "x"}, 404)["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert "JSON" in refused(server, "/v1/completions", '{"model": ')["message"]
    refused(server, "/v1/nothing", {}, 404)
    refused(server, "/v1/completions", "[]")


def test_half_a_surrogate_pair_is_the_clients_mistake(server: TestServer) -> None:
    body = '{"model": "tiny", "prompt": "ab\\ud800"}'
    assert "character 2" in refused(server, "/v1/completions", body)["message"]
    body = '{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'
    assert refused(server, "/v1/chat/completions", body)["param"] == "messages"
    assert refused(server, "/v1/completions", '{"model": "\\ud800", "prompt": "x"}', 404)["param"] == "model"


def test_models_health_metrics_status(server: TestServer, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    health = httpx.get(server.url + "/health").json()
    facts = {"status": "ok", "model": MODEL, "digest": "d" * 64, "executor": "golden", "error": None}
    assert health == {**facts, "executor_details": {}}
    before = scrape(server)
    complete(server, "the sea and the storm", max_tokens=9)
    after = scrape(server)
    assert after["pypto_deploy_completion_tokens_total"] - before["pypto_deploy_completion_tokens_total"] == 9
    assert after["pypto_deploy_ttft_seconds_count"] - before["pypto_deploy_ttft_seconds_count"] == 1
    assert after["pypto_deploy_tpot_seconds_count"] - before["pypto_deploy_tpot_seconds_count"] == 1
    assert after["pypto_deploy_pages_available"] == after["pypto_deploy_pages_total"] == 32
    assert after["pypto_deploy_bundle_info"] == 1
    status = httpx.get(server.url + "/admin/status").json()
    assert status["engine"]["pages_total"] == 32
    assert status["problem"] is None


def scrape(server: TestServer) -> dict[str, float]:
    text = httpx.get(server.url + "/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: sample.value for sample in samples if not sample.labels or sample.name.endswith("_info")}


def raw_request(server: TestServer, body: dict[str, Any]) -> socket.socket:
    """Send a request over a bare socket and leave the answer to the caller."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return sock


def wait_for_requests(server: TestServer, count: int) -> None:
    wait_until(lambda: server.counters().requests_added == count, f"request {count} in the engine")


@pytest.mark.parametrize("when", ["after one chunk", "during prefill", "not streaming"])
def test_case_20_leaving_clients_leave_nothing_behind(when: str) -> None:
    long_prompt = [7 + index % 200 for index in range(600)]
    body: dict[str, Any] = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 900, "temperature": 0}
    body |= {"ignore_eos": True, "stream": when != "not streaming"}
    if when == "during prefill":
        body["prompt"] = long_prompt
    options = EngineOptions(max_batch_tokens=64, max_running=4, prefix_cache=False)
    with serve_engine(GoldenExecutor(num_pages=32), TOKENIZER, options) as server:
        expected = complete(server, "the sea")
        added = server.counters().requests_added
        for index in range(50):
            sock = raw_request(server, body)
            if when == "after one chunk":
                received = b""
                while received.count(b"data: ") < 1:
                    received += sock.recv(4096)
            else:
                wait_for_requests(server, added + index + 1)
            sock.close()
        wait_until(lambda: is_idle(server.counters()), "idle engine")
        counters = server.counters()
        assert counters.requests_aborted == 50
        assert counters.requests_finished == 1
        assert server.engine.active_requests == 0
        assert complete(server, "the sea")["choices"] == expected["choices"]
        text = httpx.get(server.url + "/metrics").text
        assert 'pypto_deploy_requests_total{outcome="abort"} 50.0' in text


def test_case_23_failing_executor_is_told_to_everybody() -> None:
    failing = threading.Event()

    def fail_when_told(batch: Sequence[Chunk]) -> None:
        if failing.is_set():
            raise ExecutorError("the executor process was killed (signal 9)")

    executor = GoldenExecutor(before_forward=fail_when_told)
    with (
        serve_engine(executor, TOKENIZER) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(
            model=MODEL, prompt="x", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        results: list[Any] = []
        waiting = threading.Thread(
            target=lambda: results.append(
                post(server, "/v1/completions", {"model": MODEL, "prompt": "y", "max_tokens": 900, "ignore_eos": True})
            )
        )
        waiting.start()
        wait_until(lambda: server.counters().running == 2, "second request running")
        failing.set()
        with pytest.raises(openai.APIError, match="signal 9"):
            list(stream)
        waiting.join()
        assert results[0].status_code == 503
        assert "signal 9" in results[0].json()["error"]["message"]
        health = httpx.get(server.url + "/health")
        assert health.status_code == 503
        assert "signal 9" in health.json()["error"]
        assert post(server, "/v1/completions", {"model": MODEL, "prompt": "y"}).status_code == 503
        assert executor.closed.is_set()


def test_not_ready_is_503_with_the_reason() -> None:
    with serve_app(ModelService(MODEL)) as url:
        health = httpx.get(url + "/health")
        assert (health.status_code, health.json()["status"]) == (503, "starting")
        response = httpx.post(url + "/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert httpx.get(url + "/metrics").status_code == 200


def test_case_15_and_16_over_http() -> None:
    text = "caf\u00e9 \U0001f468\u200d\U0001f469\u200d\U0001f467 lo.\n\nUser: more"
    script = [*TOKENIZER.encode(text), EOS_ID]
    body: dict[str, Any] = {"model": MODEL, "prompt": [9], "max_tokens": 200, "temperature": 0, "stop": "\nUser"}
    with serve_engine(ScriptedExecutor(script), TOKENIZER) as server:
        whole = post(server, "/v1/completions", body).json()["choices"][0]
        lines = post(server, "/v1/completions", {**body, "stream": True}).text.splitlines()
        assert lines[-2] == "data: [DONE]"
        chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        assert (whole["text"], whole["finish_reason"]) == (text.partition("\nUser")[0], "stop")
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        assert all("\ufffd" not in chunk["text"] for chunk in chunks)
        assert chunks[-1]["finish_reason"] == "stop"


def test_bench_follows_the_protocol(server: TestServer) -> None:
    finished = server.counters().requests_finished
    seen: list[tuple[int, int]] = []
    result = measure_tpot(server.url, progress=lambda done, total: seen.append((done, total)))
    assert server.counters().requests_finished - finished == 6
    assert seen[-1] == (6, 6)
    assert len(result.requests) == 5
    assert all(request.completion_tokens == 48 for request in result.requests)
    assert result.tpot_ms == sorted(request.tpot_ms for request in result.requests)[2] > 0
    assert (result.model, result.digest, result.platform) == (MODEL, "d" * 64, "golden")
    assert BenchResult(**{**result.to_json(), "requests": result.requests}) == result


def test_bench_says_what_is_wrong(server: TestServer) -> None:
    with pytest.raises(BenchError, match="not ready"), serve_app(ModelService(MODEL)) as url:
        measure_tpot(url)
    with pytest.raises(BenchError, match="ConnectError"):
        measure_tpot("http://127.0.0.1:9")
    with pytest.raises(BenchError, match="context"):
        measure_tpot(server.url, prompt="x" * 5000)


def test_keep_alive_connection_serves_many_requests(server: TestServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    for _ in range(3):
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2}),
            {"content-type": "application/json"},
        )
        assert connection.getresponse().read()
    connection.close()


def test_case_23_killed_interpreter_process(tmp_path: Path) -> None:
    make_tiny_qwen3(tmp_path / "model", num_hidden_layers=1)
    quantize_checkpoint(tmp_path / "model", tmp_path / "w8a8", Recipe())
    stage_checkpoint(tmp_path / "w8a8", tmp_path / "slabs")
    with serve_engine(open_executor(tmp_path / "slabs", "pypto", num_pages=4), TOKENIZER) as server:
        answers: list[httpx.Response] = []
        body = {"model": MODEL, "prompt": "x", "max_tokens": 400, "ignore_eos": True}
        request = threading.Thread(target=lambda: answers.append(post(server, "/v1/completions", body)))
        request.start()
        wait_until(lambda: kill_child_processes() > 0, "a process of the executor")
        request.join()
        assert answers[0].status_code == 503
        assert "the engine failed" in answers[0].json()["error"]["message"]
        health = httpx.get(server.url + "/health")
        assert health.status_code == 503
        assert "PyPTO programs failed" in health.json()["error"]


def kill_child_processes() -> int:
    """Kill this process's children with SIGKILL; returns how many there were."""
    children = {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(children)
