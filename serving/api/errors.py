"""Errors in the shape that OpenAI's clients read: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from serving.errors import EngineError, RequestError


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON body of an error; `kind` is OpenAI's error type."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def engine_error_body(error: EngineError) -> dict[str, Any]:
    """The JSON body of a failure that is the server's own; also sent as an event in a stream already begun."""
    return error_body(str(error), "server_error", code="engine_unavailable")


def _request_error(_: Request, error: Exception) -> JSONResponse:
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    status = 404 if code == "model_not_found" else 400
    return JSONResponse(error_body(str(error), "invalid_request_error", param, code), status)


def _validation_error(_: Request, error: Exception) -> JSONResponse:
    """Only the first finding is told: a union reports every alternative, which helps nobody."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        message, param = "the request body is not valid JSON", None
    else:
        param = path[0] if path else None
        message = f"{'.'.join(path) or 'body'}: {first['msg']}"
    return JSONResponse(error_body(message, "invalid_request_error", param), 400)


def _engine_error(_: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, EngineError):
        raise error
    return JSONResponse(engine_error_body(error), 503)


def _http_error(_: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    return JSONResponse(error_body(str(error.detail), "invalid_request_error"), error.status_code)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error of `app` in OpenAI's shape."""
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(EngineError, _engine_error)
    app.add_exception_handler(HTTPException, _http_error)
