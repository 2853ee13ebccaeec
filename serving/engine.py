"""The engine: requests in, tokens and text out, one step at a time.

`Engine.step()` asks the scheduler for work, runs it as one batch on the executor, samples a token for each
sequence whose last token was computed, and turns it into text. It is single-threaded and knows nothing of HTTP;
`serving.async_engine` runs it for many clients.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass

import torch

from serving.errors import ExecutorError, RequestError
from serving.executor.base import PAGE_TOKENS, Chunk, Executor
from serving.kv_cache import PagePool
from serving.sampler import Sampled, Sampler, TokenLogprobs
from serving.sampling_params import SamplingParams
from serving.scheduler import ScheduledChunk, Scheduler
from serving.sequence import FinishReason, Sequence
from serving.stop_strings import StopStringMatcher
from serving.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True)
class EngineOptions:
    """Limits of one engine: tokens per step, sequences at once, and whether prompts may share pages."""

    max_batch_tokens: int = 512
    max_running: int = 64
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        """Refuse limits under which nothing could ever run."""
        if self.max_running < 1 or self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens={self.max_batch_tokens} and max_running={self.max_running}: at least one sequence "
                "must run, and every running sequence needs a token of the budget"
            )


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt in ids and what to do with it; `request_id` is unique among the live requests of an engine."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class TokenEvent:
    """What one step produced for one request.

    `token_id` is None only for a request that generates nothing (`max_tokens` 0). `text` is what may be shown now: it
    can be empty, and can hold text of earlier tokens that was held back. The end-of-sequence token counts as a
    completion token and has no text. `finish_reason` is set in a request's last event.
    """

    request_id: str
    token_id: int | None
    text: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class EngineCounters:
    """Running totals of one engine since it started, and its state now."""

    steps: int
    requests_added: int
    requests_finished: int
    requests_aborted: int
    prompt_tokens: int
    completion_tokens: int
    computed_tokens: int
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    running: int
    waiting: int
    pages_total: int
    pages_available: int


@dataclass
class _Live:
    sequence: Sequence
    sampler: Sampler
    decoder: IncrementalDecoder
    stops: StopStringMatcher


class Engine:
    """Runs many requests on one executor, each as if it were alone."""

    def __init__(self, executor: Executor, tokenizer: Tokenizer, options: EngineOptions | None = None) -> None:
        """Serve `executor`'s model; a sequence ends at any end-of-sequence id of its configs and tokenizer."""
        self.executor = executor
        self.tokenizer = tokenizer
        options = options or EngineOptions()
        self._pool = PagePool(executor.num_pages, options.prefix_cache)
        self._scheduler = Scheduler(self._pool, options.max_batch_tokens, options.max_running)
        self._live: dict[str, _Live] = {}
        # Requests that generate nothing finish in the next step without ever being scheduled.
        self._empty: list[GenerationRequest] = []
        eos = {*executor.config.eos_token_ids, tokenizer.eos_token_id}
        self.eos_token_ids = frozenset(token_id for token_id in eos if token_id is not None)
        self.max_context_tokens = min(executor.max_context_tokens, executor.num_pages * PAGE_TOKENS)
        self._steps = self._added = self._finished = self._aborted = 0
        self._prompt_tokens = self._completion_tokens = self._computed_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work or bool(self._empty)

    def check(self, prompt_ids: Ids[int]) -> None:
        """Refuse a prompt that cannot be served, with a RequestError; touches no state, so any thread may call it."""
        if not prompt_ids:
            raise RequestError("the prompt is empty; give at least one token", "prompt")
        vocab_size = self.executor.config.vocab_size
        for token_id in prompt_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"prompt token id {token_id} is outside the vocabulary; ids are 0 to {vocab_size - 1}", "prompt"
                )
        if len(prompt_ids) > self.max_context_tokens:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens and the model's context {self.max_context_tokens}; "
                "shorten the prompt",
                "prompt",
                "context_length_exceeded",
            )

    def add(self, request: GenerationRequest) -> None:
        """Take a request in; RequestError when it can never be served or its id is in use."""
        self.check(request.prompt_ids)
        if request.request_id in self._live:
            raise RequestError(f"request id {request.request_id} is in use")
        self._added += 1
        self._prompt_tokens += len(request.prompt_ids)
        if request.params.max_tokens == 0:
            self._empty.append(request)
            return
        # The last token generated is never computed, so it needs no place in the context.
        room = self.max_context_tokens - len(request.prompt_ids) + 1
        asked = request.params.max_tokens
        sequence = Sequence(
            request.request_id, request.prompt_ids, request.params, room if asked is None else min(room, asked)
        )
        self._live[request.request_id] = _Live(
            sequence,
            Sampler(request.params),
            IncrementalDecoder(self.tokenizer),
            StopStringMatcher(request.params.stop),
        )
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> bool:
        """Stop a request and free its pages; False when it is not live (already finished, or never seen)."""
        empty = [request for request in self._empty if request.request_id != request_id]
        live = self._live.pop(request_id, None)
        if live is not None:
            self._scheduler.remove(live.sequence)
        elif len(empty) == len(self._empty):
            return False
        self._empty = empty
        self._aborted += 1
        return True

    def step(self) -> list[TokenEvent]:
        """Run one batch; returns an event for each request that got a token. ExecutorError leaves through here."""
        events = [TokenEvent(r.request_id, None, "", "length", len(r.prompt_ids), 0, 0) for r in self._empty]
        self._finished += len(events)
        self._empty = []
        chunks = self._scheduler.schedule()
        if not chunks:
            return events
        logits = self.executor.forward([self._as_executor_chunk(chunk) for chunk in chunks])
        if not bool(torch.isfinite(logits).all()):
            raise ExecutorError("the executor returned logits that are not finite; the weights or kernels are broken")
        self._steps += 1
        row = 0
        for chunk in chunks:
            sequence, completes = chunk.sequence, chunk.completes
            sequence.computed_tokens += chunk.num_tokens
            self._computed_tokens += chunk.num_tokens
            self._pool.publish(sequence)
            if completes:
                live = self._live[sequence.request_id]
                events.append(self._advance(live, live.sampler.sample(logits[row])))
                row += 1
        return events

    def counters(self) -> EngineCounters:
        """Totals and present state, for metrics and tests."""
        return EngineCounters(
            steps=self._steps,
            requests_added=self._added,
            requests_finished=self._finished,
            requests_aborted=self._aborted,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            computed_tokens=self._computed_tokens,
            preemptions=self._scheduler.preemptions,
            prefix_queried_tokens=self._pool.counters.queried_tokens,
            prefix_hit_tokens=self._pool.counters.hit_tokens,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages_total=self._pool.num_pages,
            pages_available=self._pool.available_pages,
        )

    @staticmethod
    def _as_executor_chunk(chunk: ScheduledChunk) -> Chunk:
        sequence = chunk.sequence
        start = sequence.computed_tokens
        return Chunk(
            token_ids=sequence.token_slice(start, start + chunk.num_tokens),
            start_position=start,
            pages=tuple(sequence.pages),
            logits="last" if chunk.completes else "none",
        )

    def _advance(self, live: _Live, sampled: Sampled) -> TokenEvent:
        """Append a sampled token to its sequence and work out the text and whether the request is finished."""
        sequence = live.sequence
        params = sequence.params
        sequence.output_ids.append(sampled.token_id)
        self._completion_tokens += 1
        finish: FinishReason | None = None
        if sampled.token_id in self.eos_token_ids and not params.ignore_eos:
            text, stopped = live.stops.push(live.decoder.flush())
            text += "" if stopped else live.stops.flush()
            finish = "stop"
        else:
            text, stopped = live.stops.push(live.decoder.push(sampled.token_id))
            if stopped:
                finish = "stop"
            elif len(sequence.output_ids) >= sequence.max_new_tokens:
                rest, stopped = live.stops.push(live.decoder.flush())
                text += rest if stopped else rest + live.stops.flush()
                finish = "stop" if stopped else "length"
        event = TokenEvent(
            request_id=sequence.request_id,
            token_id=sampled.token_id,
            text=text,
            finish_reason=finish,
            prompt_tokens=len(sequence.prompt_ids),
            completion_tokens=len(sequence.output_ids),
            cached_tokens=sequence.cached_tokens or 0,
            logprobs=sampled.logprobs,
        )
        if finish is not None:
            self._scheduler.remove(sequence)
            del self._live[sequence.request_id]
            self._finished += 1
        return event


def is_idle(counters: EngineCounters) -> bool:
    """Whether nothing runs or waits and every page is back in the pool."""
    idle = counters.running == 0 and counters.waiting == 0
    return idle and counters.pages_available == counters.pages_total


__all__ = [
    "Engine",
    "EngineCounters",
    "EngineOptions",
    "GenerationRequest",
    "TokenEvent",
    "is_idle",
]
