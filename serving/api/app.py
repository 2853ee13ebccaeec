"""The HTTP routes: OpenAI's generation endpoints, and health, metrics and status for operators."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from serving.api.errors import install_error_handlers
from serving.api.formats import AnswerFormat, ChatFormat, CompletionFormat
from serving.api.metrics import ServingMetrics
from serving.api.response import GenerationResponse
from serving.api.schema import ChatBody, CompletionBody, GenerationBody
from serving.async_engine import RequestStream
from serving.deployment import Deployment, ModelService
from serving.engine import GenerationRequest
from serving.errors import EngineError, RequestError
from serving.sampling_params import SamplingParams

StatusSource = Callable[[], dict[str, Any]]


def create_app(service: ModelService, worker_status: StatusSource | None = None) -> FastAPI:
    """Build the application over `service`; `worker_status` adds what the process knows to `/admin/status`."""
    # Interactive documentation loads its page from a content network; a serving worker should not point there.
    app = FastAPI(title="pypto-deploy", docs_url=None, redoc_url=None)
    metrics = ServingMetrics(service)
    install_error_handlers(app)
    _add_generation_routes(app, service, metrics)
    _add_model_routes(app, service)
    _add_operator_routes(app, service, metrics, worker_status)
    return app


def _add_generation_routes(app: FastAPI, service: ModelService, metrics: ServingMetrics) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionBody) -> Response:
        """Continue a prompt (text or token ids)."""
        _check_body(service, body)
        params, prompts = body.params(), body.prompts()
        deployment = service.require()
        with deployment.admission():
            encoded = [
                await asyncio.to_thread(deployment.tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]
            streams = _submit(deployment, encoded, params)
        answer = CompletionFormat(body.model, deployment.tokenizer, body.logprobs is not None, body.return_token_ids)
        return _respond(streams, answer, metrics, body)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody) -> Response:
        """Answer a conversation."""
        _check_body(service, body)
        params, conversation = body.params(), body.conversation()
        deployment = service.require()
        with deployment.admission():
            prompt_ids = await asyncio.to_thread(deployment.tokenizer.encode_chat, conversation)
            streams = _submit(deployment, [prompt_ids], params)
        answer = ChatFormat(body.model, deployment.tokenizer, bool(body.logprobs), body.return_token_ids)
        return _respond(streams, answer, metrics, body)


def _check_body(service: ModelService, body: GenerationBody) -> None:
    if body.model != service.served_model_name:
        raise RequestError(
            f"the model {body.model!r} does not exist; this server has {service.served_model_name!r}",
            "model",
            "model_not_found",
        )
    body.refuse_unsupported()


def _submit(deployment: Deployment, prompts: list[list[int]], params: SamplingParams) -> list[RequestStream]:
    """Submit one request a prompt, all or none."""
    for prompt_ids in prompts:
        deployment.engine.engine.check(prompt_ids)
    streams: list[RequestStream] = []
    try:
        for prompt_ids in prompts:
            request = GenerationRequest(uuid.uuid4().hex, tuple(prompt_ids), params)
            streams.append(deployment.engine.submit(request))
    except EngineError:
        for stream in streams:
            stream.abort()
        raise
    return streams


def _respond(
    streams: list[RequestStream], answer: AnswerFormat, metrics: ServingMetrics, body: GenerationBody
) -> Response:
    return GenerationResponse(streams, answer, metrics, streaming=bool(body.stream), include_usage=body.include_usage)


def _add_model_routes(app: FastAPI, service: ModelService) -> None:
    def model_card() -> dict[str, Any]:
        deployment = service.require()
        return {
            "id": service.served_model_name,
            "object": "model",
            "created": deployment.created_unix_s,
            "owned_by": "pypto-deploy",
            "digest": deployment.digest,
            "max_model_len": deployment.engine.engine.max_context_tokens,
        }

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The one model served."""
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{model:path}")
    async def get_model(model: str) -> dict[str, Any]:
        """The card of one model; 404 for any other name."""
        if model != service.served_model_name:
            raise RequestError(f"the model {model!r} does not exist", "model", "model_not_found")
        return model_card()


def _add_operator_routes(
    app: FastAPI, service: ModelService, metrics: ServingMetrics, worker_status: StatusSource | None
) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 when requests can be served, with the digest; 503 with the reason otherwise."""
        problem = service.problem()
        deployment = service.deployment
        status = "ok" if problem is None else ("starting" if deployment is None else "failed")
        body: dict[str, Any] = {
            "status": status,
            "model": service.served_model_name,
            "digest": deployment.digest if deployment else None,
            "executor": deployment.kind if deployment else None,
            "executor_details": deployment.executor_details if deployment else {},
            "error": problem,
        }
        return JSONResponse(body, 200 if problem is None else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/admin/status")
    async def status() -> dict[str, Any]:
        """Engine counters, limits, and what the worker process knows."""
        deployment = service.deployment
        engine = deployment.engine.engine if deployment else None
        return {
            "model": service.served_model_name,
            "digest": deployment.digest if deployment else None,
            "executor": deployment.kind if deployment else None,
            "problem": service.problem(),
            "max_context_tokens": engine.max_context_tokens if engine else None,
            "engine": asdict(engine.counters()) if engine else None,
            "worker": worker_status() if worker_status else None,
        }
