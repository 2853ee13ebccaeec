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
    """Tell what is wrong with the first field at fault; a field of several accepted forms has a finding for each."""
    if not isinstance(error, RequestValidationError):
        raise error
    findings = error.errors()
    if findings[0]["type"] == "json_invalid":
        message, param = "the request body is not valid JSON", None
    else:
        paths = [[str(part) for part in finding["loc"] if part != "body"] for finding in findings]
        param = paths[0][0] if paths[0] else None
        of_field = [finding["msg"] for finding, path in zip(findings, paths, strict=True) if path[:1] == paths[0][:1]]
        message = f"{param or 'body'}: {', or: '.join(dict.fromkeys(of_field))}"
    return JSONResponse(error_body(message, "invalid_request_error", param), 400)


def _engine_error(_: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, EngineError):
        raise error
    return JSONResponse(engine_error_body(error), 503)


def _internal_error(_: Request, error: Exception) -> JSONResponse:
    """A defect of the server: the client gets the shape it can read, the server's log the traceback."""
    return JSONResponse(error_body(f"internal error: {type(error).__name__}", "server_error"), 500)


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
    app.add_exception_handler(Exception, _internal_error)
