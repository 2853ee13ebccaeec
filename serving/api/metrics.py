"""Prometheus metrics of a worker, in a registry of their own so that several can live in one process."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serving.async_engine import RequestStream
from serving.deployment import ModelService

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class _EngineState(Collector):
    """Reads the present deployment at scrape time, so a switch needs no bookkeeping."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """Gauges of the present engine and the digest it serves; nothing before one is loaded."""
        deployment = self._service.deployment
        if deployment is None:
            return
        counters = deployment.engine.counters()
        gauges = {
            "running": ("Sequences running", counters.running),
            "waiting": ("Sequences waiting", counters.waiting),
            "pages_total": ("Pages of the KV cache", counters.pages_total),
            "pages_available": ("Pages that no sequence holds", counters.pages_available),
            "preemptions": ("Preemptions of the present engine", counters.preemptions),
            "prefix_hit_tokens": ("Tokens found by the present engine's prefix cache", counters.prefix_hit_tokens),
            "healthy": ("1 when requests can be served", int(self._service.problem() is None)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"pypto_deploy_{name}", text, value=value)
        info = InfoMetricFamily("pypto_deploy_bundle", "The bundle being served")
        info.add_metric([], {"digest": deployment.digest, "executor": deployment.kind})
        yield info


class ServingMetrics:
    """Counters and histograms over all requests of a worker, whichever deployment served them."""

    def __init__(self, service: ModelService) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineState(service))
        self._requests = Counter(
            "pypto_deploy_requests",
            "Requests by outcome: stop, length, abort, error",
            ["outcome"],
            registry=self.registry,
        )
        self._prompt_tokens = Counter("pypto_deploy_prompt_tokens", "Prompt tokens served", registry=self.registry)
        self._cached_tokens = Counter(
            "pypto_deploy_cached_prompt_tokens", "Prompt tokens taken from the prefix cache", registry=self.registry
        )
        self._completion_tokens = Counter("pypto_deploy_completion_tokens", "Tokens generated", registry=self.registry)
        self._ttft = Histogram(
            "pypto_deploy_ttft_seconds", "Submission to first token", registry=self.registry, buckets=SECONDS_BUCKETS
        )
        self._tpot = Histogram(
            "pypto_deploy_tpot_seconds",
            "Mean time between the tokens of a request of at least two",
            registry=self.registry,
            buckets=SECONDS_BUCKETS,
        )

    def observe(self, stream: RequestStream, outcome: str) -> None:
        """Account for a request that has come to its end: `outcome` is stop, length, abort or error."""
        self._requests.labels(outcome).inc()
        self._prompt_tokens.inc(len(stream.request.prompt_ids))
        event, times = stream.last_event, stream.times
        if event is None:
            return
        self._cached_tokens.inc(event.cached_tokens)
        self._completion_tokens.inc(event.completion_tokens)
        if times.first_token_s is None or times.last_token_s is None:
            return
        self._ttft.observe(times.first_token_s - times.submitted_s)
        if event.completion_tokens > 1:
            self._tpot.observe((times.last_token_s - times.first_token_s) / (event.completion_tokens - 1))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
