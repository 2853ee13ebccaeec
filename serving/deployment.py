"""One loaded model behind the API, and the place where the API finds the present one.

A `Deployment` is a bundle (or any executor and tokenizer) with its running engine. `ModelService` names the present
deployment; switching replaces it for new requests while the old one finishes its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from serving.async_engine import AsyncEngine
from serving.errors import EngineError
from serving.tokenizer import Tokenizer

DRAIN_POLL_S = 0.02


@dataclass
class Deployment:
    """A loaded model: its engine, tokenizer, bundle digest and the kind of its executor (`cpu`, `pypto`, ...).

    `executor_details` says more of the executor: backend, instruction set, threads.
    """

    engine: AsyncEngine
    tokenizer: Tokenizer
    digest: str
    kind: str
    executor_details: dict[str, Any] = field(default_factory=dict)
    created_unix_s: int = field(default_factory=lambda: int(time.time()))
    _admitting: int = field(default=0, init=False)

    @contextmanager
    def admission(self) -> Iterator[None]:
        """Hold the deployment open while a request is on its way from tokenizing to the engine."""
        self._admitting += 1
        try:
            yield
        finally:
            self._admitting -= 1

    @property
    def busy(self) -> bool:
        """Whether any request is in the engine or on its way there."""
        return self._admitting > 0 or self.engine.active_requests > 0

    async def drain(self, timeout_s: float) -> bool:
        """Wait until no request is left; False when some are still there after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.busy:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(DRAIN_POLL_S)
        return True


class ModelService:
    """The model that the API serves now; lives in one event loop."""

    def __init__(self, served_model_name: str) -> None:
        """Start without a deployment: `require` refuses and health says "starting" until one is put in place."""
        self.served_model_name = served_model_name
        self.deployment: Deployment | None = None

    def replace(self, deployment: Deployment) -> Deployment | None:
        """Send new requests to `deployment`; returns the one before, for the caller to drain and close."""
        old, self.deployment = self.deployment, deployment
        return old

    def problem(self) -> str | None:
        """Why requests cannot be served now; None when they can."""
        if self.deployment is None:
            return "the model is still loading"
        return self.deployment.engine.failure

    def require(self) -> Deployment:
        """The present deployment, or an EngineError that says why there is none to use."""
        problem = self.problem()
        if self.deployment is None or problem is not None:
            raise EngineError(problem or "no model is loaded")
        return self.deployment
